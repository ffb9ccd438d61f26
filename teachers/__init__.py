"""Teachers for QDagger: loads a policy, or replay data, from every format that teachers are published in.

    format                                                            module
    this project's model.msgpack, or its run folder                   msgpack_files.py
    CleanRL's .cleanrl_model (JAX: DQN, C51, PPO, QDagger)            msgpack_files.py
    Dopamine's JAX checkpoint ckpt.N (DQN, C51, Rainbow)              dopamine.py, restricted_pickle.py
    Stable-Baselines3's .zip (DQN, PPO)                               stable_baselines.py, restricted_pickle.py
    replay data: Dopamine's $store$_*_ckpt.N.gz                       dopamine.py
    replay data: this project's replay_*.npz                          replay.py

    teacher = load_teacher("runs/Pong-v5__ppo_atari__1__1700000000", num_actions=6)
    scores = jax.jit(teacher.apply)(obs)    # obs [B, 4, 84, 84] uint8, scores [B, 6]

The format is recognised by content, not by name. All errors are `TeacherError`. No code of a file is ever run, nothing
is unpacked to disk, and sizes are checked before memory is taken.
"""

import re
from pathlib import Path

from . import dopamine, msgpack_files, stable_baselines
from .errors import MAX_TEACHER_BYTES, TeacherError, reading
from .network import Teacher
from .replay import Replay, read_shards, save_replay
from .scores import SCORES, Scores, scores_of

__all__ = [
    "SCORES", "Replay", "Scores", "Teacher", "TeacherError",
    "bundled_teacher", "load_replay", "load_teacher", "replay_beside", "save_replay", "scores_of",
]  # fmt: skip


def load_teacher(path_or_hub_id: str | Path, *, num_actions: int) -> Teacher:
    """A teacher for a game of `num_actions` actions, from a file, a run folder, or "hf://owner/repo/file".

    Raises TeacherError where there is none, where its format or network is unknown, where a leaf has another shape than
    the network, and where it has another number of actions."""
    source = str(path_or_hub_id)
    path = download(source) if source.startswith("hf://") else own_path(path_or_hub_id)
    if path.is_dir():
        path, folder = path / "model.msgpack", path
        if not path.is_file():
            raise TeacherError(f"{folder}: no model.msgpack in it; name a finished run's folder, or the file itself")
        source = str(path)
    if not path.is_file():
        raise TeacherError(f"{source}: no such file or folder; give a path, or hf://owner/repo/file")
    if path.stat().st_size > MAX_TEACHER_BYTES:
        raise TeacherError(f"{source}: larger than {MAX_TEACHER_BYTES >> 20} MiB; for replay data use load_replay")
    with reading(source):
        data = path.read_bytes()
    if data.startswith(b"PK\x03\x04"):
        return stable_baselines.read_zip(path, source, num_actions)
    if re.match(rb"\x80[\x02-\x05]", data):  # a pickle's protocol; msgpack would begin an empty map with the first byte
        return dopamine.read_checkpoint(data, source, num_actions)
    return msgpack_files.read_msgpack(data, source, num_actions)


def load_replay(path: str | Path, *, num_actions: int, start: int = 0, count: int | None = None) -> Replay:
    """Teacher data: `count` rows (all by default) from row `start` on, the oldest being 0; -n: the newest n.

    `path`: a folder of Dopamine's files or of this project's shards, a run folder with shards in replay/, or, where a
    folder holds the replay of several checkpoints, one of the files $store$_observation_ckpt.N.gz. Raises TeacherError
    where there is none, where a file is damaged, where an action is none of the game's, and where it is too large."""
    path = own_path(path)
    member = re.fullmatch(r".*_ckpt\.(\d+)\.gz", path.name)
    if member and path.is_file():
        return dopamine.read_replay(path.parent, member[1], num_actions, start, count)
    if path.suffix == ".npz":
        raise TeacherError(f"{path}: a shard is read with the others of its folder; name {path.parent}")
    if not path.is_dir():
        raise TeacherError(f"{path}: no such folder; name one with $store$_*_ckpt.N.gz or replay_*.npz files")
    for folder in path, path / "replay":
        if any(folder.glob("*.npz")):
            return read_shards(folder, num_actions, start, count)
    return dopamine.read_replay(path, dopamine.find_suffix(path), num_actions, start, count)


def replay_beside(teacher: str | Path) -> Path | None:
    """Where a teacher's own replay lies: in its run folder, or beside a Dopamine checkpoint ckpt.N. None if nowhere."""
    path = own_path(teacher)
    path = path.parent if path.name == "model.msgpack" else path
    if any((path / "replay").glob("*.npz")):
        return path / "replay"
    beside = path.parent / f"$store$_observation_{path.name}.gz"
    return beside if re.fullmatch(r"ckpt\.\d+", path.name) and beside.is_file() else None


def bundled_teacher(env_id: str) -> Path:
    """The teacher that comes with this package, for a game by EnvPool's name ("Pong-v5")."""
    path = Path(__file__).parent / f"{env_id.partition('-')[0].lower()}.msgpack"
    if not path.is_file():
        raise TeacherError(f"{env_id}: no bundled teacher at {path}; name one with --teacher, or train one first")
    return path


def own_path(given: str | Path) -> Path:
    """A path that the user gave, ~ expanded; an impossible one is an error."""
    try:
        path = Path(given).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long a name, an unknown user's home, a zero byte
        raise TeacherError(f"{str(given)[:100]}: no such file or folder ({error}); give another path") from error
    return path


def download(address: str) -> Path:
    """The local copy of "hf://owner/repo/file", which huggingface-hub keeps or fetches."""
    parts = re.fullmatch(r"hf://([\w.-]+/[\w.-]+)/([\w./-]+)", address)
    if not parts or ".." in address:
        raise TeacherError(f"{address}: not of the form hf://owner/repo/file")
    remedy = "or download the file yourself and pass its path"
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise TeacherError(f"{address}: needs huggingface-hub; run pip install huggingface-hub, {remedy}") from None
    try:
        return Path(hf_hub_download(parts[1], parts[2]))
    except Exception as error:  # its own errors, those of the HTTP client, and of the disk
        reason = " ".join(str(error).split())[:150]
        raise TeacherError(
            f"{address}: neither cached nor downloadable ({type(error).__name__}: {reason}); check the name and the "
            f"connection, {remedy}"
        ) from error
