"""Teachers of Stable-Baselines3: the .zip of DQN("CnnPolicy") or PPO("CnnPolicy"), nature network.

The archive's member policy.pth is a torch state_dict; nothing else in it is read (data holds pickled code), and nothing
is unpacked to disk. It is an archive itself, as torch has written it since 1.6: NAME/data.pkl is a pickle of the
tensors' names and shapes, which is not run (restricted_pickle.py), and NAME/data/0, 1, ... are their numbers, little
endian. So torch is not needed.

Keys, as of SB3 2.x: DQN q_net.features_extractor.{cnn.{0,2,4},linear.0}, q_net.q_net.0 (and the same under
q_net_target); PPO features_extractor.{cnn.{0,2,4},linear.0}, action_net, value_net (the policy's and the critic's own
names of the extractor repeat it).

torch keeps a convolution as [out, in, height, width], flax as [height, width, in, out]; a dense layer [out, in], flax
[in, out]. The first dense layer reads a flattened [64, 7, 7] there and [7, 7, 64] here, so its rows are permuted.
"""

import io
import zipfile
from functools import cache
from pathlib import Path

import numpy as np

from . import restricted_pickle
from .errors import MAX_TEACHER_BYTES, TeacherError, reading
from .network import Layout, Teacher, make_teacher

PROTOCOL = {"repeat_action_probability": 0.0, "episodic_life": True, "noop_max": 30, "basis": "usual"}


def read_zip(path: Path, source: str, num_actions: int) -> Teacher:
    """A teacher from the .zip of a Stable-Baselines3 model."""
    with reading(source), zipfile.ZipFile(path) as archive:
        if "policy.pth" not in archive.namelist():
            raise TeacherError(
                f"{source}: a zip archive without policy.pth, so not of Stable-Baselines3; of CleanRL choose a model "
                "of the JAX scripts, and for replay data use load_replay"
            )
        if archive.getinfo("policy.pth").file_size > MAX_TEACHER_BYTES:
            raise TeacherError(f"{source}: policy.pth exceeds {MAX_TEACHER_BYTES >> 20} MiB; choose another teacher")
        return from_state(read_state(archive.open("policy.pth").read(MAX_TEACHER_BYTES), source), source, num_actions)


def read_state(data: bytes, source: str) -> dict[str, np.ndarray]:
    """The arrays of a state_dict that torch has saved."""
    if not zipfile.is_zipfile(io.BytesIO(data)):
        raise TeacherError(f"{source}: policy.pth was saved by torch before 1.6; save it again with a newer one")
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        if sum(member.file_size for member in archive.infolist()) > MAX_TEACHER_BYTES:
            raise TeacherError(f"{source}: policy.pth exceeds {MAX_TEACHER_BYTES >> 20} MiB; choose another teacher")
        name = next(member for member in archive.namelist() if member.endswith("/data.pkl"))
        folder = name.removesuffix("data.pkl")
        if f"{folder}byteorder" in archive.namelist() and archive.read(f"{folder}byteorder") != b"little":
            raise TeacherError(f"{source}: saved on a big-endian machine; save it again on another")
        storage = cache(lambda key: np.frombuffer(archive.read(f"{folder}data/{key}"), "<f4"))
        state = restricted_pickle.loads(archive.read(name), storage)
    arrays = {name: tensor.value for name, tensor in state.items() if isinstance(tensor, restricted_pickle.Array)}
    return {name: array for name, array in arrays.items() if array is not None}


def from_state(state: dict[str, np.ndarray], source: str, num_actions: int) -> Teacher:
    """A teacher from the arrays of a state_dict."""
    if "q_net.q_net.0.weight" in state:
        kind, prefix, head, value = "q", "q_net.features_extractor.", "q_net.q_net.0", None
    elif "action_net.weight" in state:
        kind, prefix, head, value = "policy", "features_extractor.", "action_net", "value_net"
    else:
        raise TeacherError(f"{source}: holds {', '.join(state)[:100]}; choose a DQN or PPO with CnnPolicy")
    convs = tuple(f"{prefix}cnn.{i}" for i in (0, 2, 4))
    layout = Layout(convs, f"{prefix}linear.0", head, value)
    copies = ("q_net_target.", "pi_features_extractor.", "vf_features_extractor.")
    own = {name.rpartition(".")[0] for name in state if not name.startswith(copies)}
    if own != layout.names:
        odd = ", ".join(sorted(own ^ layout.names))[:200]
        raise TeacherError(f"{source}: not CnnPolicy's default network (see {odd}); choose a teacher that has it")

    def kernel(name: str) -> np.ndarray:
        weight = state[f"{name}.weight"]
        if name == layout.hidden and weight.shape[1:] == (64 * 7 * 7,):
            weight = weight.reshape(-1, 64, 7, 7).transpose(0, 2, 3, 1).reshape(-1, 7 * 7 * 64)
        return weight.transpose(2, 3, 1, 0) if name in convs else weight.transpose()

    layers = {name: {"kernel": kernel(name), "bias": state[f"{name}.bias"]} for name in layout.names}
    return make_teacher(source, kind, layers, layout, num_actions, PROTOCOL)
