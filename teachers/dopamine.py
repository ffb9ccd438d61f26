"""Dopamine's agents and their replay data (google/dopamine, the circular buffer of its TF and early JAX agents).

Checkpoint ckpt.N: a pickled dict; online_params holds the network: {"params": tree} or, before flax linen (2020), the
bare tree with layers numbered across classes. Its nature network is padded (SAME). JAX DQN has a head [512, A], C51 and
Rainbow [512, A * 51] on the support [-10, 10].

Replay, one gzip file per member and checkpoint N, all but one in numpy's .npy form (`$` needs quotes in a shell):

    $store$_observation_ckpt.N.gz [capacity, 84, 84] uint8, $store$_action_ckpt.N.gz [capacity] int32,
    $store$_reward_ckpt.N.gz [capacity] float32, clipped to [-1, 1], $store$_terminal_ckpt.N.gz [capacity] uint8
    add_count_ckpt.N.gz            [] int64, rows ever written; row add_count % capacity is the next to be written
    episode_end_indices_ckpt.N.gz  a pickled set of rows at which episodes end, time-outs too; missing in old data,
                                   where a time-out looks like a termination

Three rows of zeros precede each episode. A row is as in `Replay`.
"""

import gzip
import re
from pathlib import Path

import numpy as np

from . import restricted_pickle
from .errors import TeacherError, reading
from .network import Layout, Teacher, atoms, choose_layout, layers_of, make_teacher
from .replay import Replay, check_replay, npy_header, read_rows, take_range

NATURE = ("Conv_0", "Conv_1", "Conv_2")
LAYOUTS = [
    Layout(NATURE, "Dense_0", "Dense_1"),
    Layout(NATURE, "Dense_3", "Dense_4"),  # before linen
    Layout(tuple(f"encoder/Stack_{k}/Conv_{i}" for k in range(3) for i in range(5)), "Dense_0", "Dense_1"),  # QDagger's
]
PROTOCOL = {  # of its gin files
    "repeat_action_probability": 0.25,
    "episodic_life": False,
    "noop_max": 1,  # none, as EnvPool says it
    "max_episode_steps": 27_000,
    "basis": "usual",
}
STORE = {  # type and shape of a row
    "observation": (np.uint8, (84, 84)),
    "action": (np.int32, ()),
    "reward": (np.float32, ()),
    "terminal": (np.uint8, ()),
}
MAX_PICKLE_BYTES = 2**24  # of the set of episode ends (a million rows hold some thousand episodes)


def read_checkpoint(data: bytes, source: str, num_actions: int) -> Teacher:
    """A teacher from the bytes of a ckpt.N: a DQN, or a C51 or Rainbow where the head has 51 outputs per action."""
    with reading(source):
        bundle = restricted_pickle.loads(data)
        if not isinstance(bundle, dict) or "online_params" not in bundle:
            raise TeacherError(f"{source}: a pickle without online_params; name the ckpt.N of a Dopamine JAX agent")
        params = bundle["online_params"]
        if isinstance(params, dict) and set(params) == {"params"}:
            params = params["params"]
        layers = layers_of(source, params)
        for name, layer in layers.items():
            layers[name] = {leaf: getattr(array, "value", None) for leaf, array in layer.items()}
        layout = choose_layout(source, layers, LAYOUTS)
        outputs = np.shape(layers[layout.head]["kernel"])[-1:]
        if outputs == (num_actions,):
            return make_teacher(source, "q", layers, layout, num_actions, PROTOCOL)
        if outputs == (51 * num_actions,):
            support = atoms(source, -10.0, 10.0, 51)
            return make_teacher(source, "c51", layers, layout, num_actions, PROTOCOL, support)
        raise TeacherError(
            f"{source}: its head has {outputs[0] if outputs else 'no'} outputs, a game of {num_actions} actions needs "
            f"{num_actions} (DQN) or {51 * num_actions} (C51, Rainbow); choose such an agent of this game"
        )


def find_suffix(folder: Path) -> str:
    """N, if the folder holds the replay of exactly one checkpoint."""
    names = (re.fullmatch(r"\$store\$_observation_ckpt\.(\d+)\.gz", path.name) for path in folder.iterdir())
    suffixes = sorted((name[1] for name in names if name), key=int)
    if not suffixes:
        raise TeacherError(f"{folder}: no replay data; name a folder with $store$_*_ckpt.N.gz or replay_*.npz")
    if len(suffixes) > 1:
        raise TeacherError(f"{folder}: holds the replays {', '.join(suffixes)}; name the observation file of one")
    return suffixes[0]


def read_replay(folder: Path, suffix: str, num_actions: int, start: int = 0, count: int | None = None) -> Replay:
    """Rows of a Dopamine replay in the order of play, or all of them; the rows of zeros count here, but are left out.

    Of the files only what precedes the last wanted row is read."""
    source = str(folder / f"$store$_*_ckpt.{suffix}.gz")

    def open_member(name: str) -> gzip.GzipFile:
        path = folder / f"{name}_ckpt.{suffix}.gz"
        if not path.is_file():
            raise TeacherError(f"{path}: no such file; a replay consists of {', '.join(STORE)}, and add_count")
        return gzip.open(path)

    # --- which rows, in which part of the files ---
    with reading(source):
        with open_member("add_count") as stream:
            np.lib.format.read_magic(stream)
            shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            if shape != () or dtype.kind not in "iu":
                raise TeacherError(f"{source}: add_count is not one integer; get the file again")
            add_count = int(np.frombuffer(stream.read(dtype.itemsize), dtype)[0])
        with open_member("$store$_observation") as stream:
            capacity = npy_header(stream, source, *STORE["observation"])
        if capacity < 1 or add_count < 1:
            raise TeacherError(f"{source}: the replay is empty; name that of a later checkpoint")
        start, count = take_range(source, start, count, min(add_count, capacity))
        oldest = add_count % capacity if add_count > capacity else 0
        first = (oldest + start) % capacity
        before_the_edge = min(count, capacity - first)
        parts = [(first, before_the_edge, 0), (0, count - before_the_edge, before_the_edge)]
        parts = [part for part in parts if part[1]]

    # --- the rows ---
    columns = {name: np.empty((count, *row_shape), dtype) for name, (dtype, row_shape) in STORE.items()}
    for name, (dtype, row_shape) in STORE.items():
        with reading(f"{source}, {name}"), open_member(f"$store$_{name}") as stream:
            if npy_header(stream, f"{source}, {name}", dtype, row_shape) != capacity:
                raise TeacherError(f"{source}: {name} has not as many rows as observation; get the files again")
            read_rows(stream, f"{source}, {name}", capacity, parts, columns[name])
    terminated, truncated = columns["terminal"] != 0, np.zeros(count, bool)
    if (folder / f"episode_end_indices_ckpt.{suffix}.gz").is_file():
        with reading(f"{source}, episode_end_indices"), open_member("episode_end_indices") as stream:
            data = stream.read(MAX_PICKLE_BYTES + 1)
            if len(data) > MAX_PICKLE_BYTES:
                raise TeacherError(f"{source}: episode_end_indices is larger than {MAX_PICKLE_BYTES >> 20} MiB")
            ends = np.array(sorted(restricted_pickle.loads(data)), np.int64)
            ends = (ends - first) % capacity
            truncated[ends[ends < count]] = True
            truncated &= ~terminated

    # --- without the rows of zeros ---
    starts = np.flatnonzero(terminated | truncated) + 1
    if start == oldest == 0 and add_count <= capacity:  # the very first episode
        starts = np.insert(starts, 0, 0)
    zeros = (starts[:, None] + np.arange(3)).ravel()
    zeros = zeros[zeros < count]
    if any(column[zeros].any() for column in columns.values()):
        raise TeacherError(f"{source}: an episode begins without three rows of zeros; choose data of 4 stacked frames")
    is_first, keep = np.zeros(count, bool), np.ones(count, bool)
    is_first[starts[starts + 3 < count] + 3] = True
    keep[zeros] = False
    if not keep.any():
        raise TeacherError(f"{source}: these rows hold no step; ask for more")
    return check_replay(
        Replay(
            frames=compact(columns["observation"], keep),
            action=columns["action"][keep],
            reward=columns["reward"][keep],
            terminated=terminated[keep],
            truncated=truncated[keep],
            first=is_first[keep],
            protocol=PROTOCOL | {"reward_clip": True},
            source=source,
        ),
        num_actions,
    )


def compact(array: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """array[keep], in its own memory: the frames would not fit twice."""
    rows = np.flatnonzero(keep)
    for at in range(0, len(rows), 4096):
        some = rows[at : at + 4096]
        array[at : at + len(some)] = array[some]
    return array[: len(rows)]
