"""Teachers of Stable-Baselines3: the .zip of DQN("CnnPolicy") or PPO("CnnPolicy"), nature network. Needs torch.

The archive's member policy.pth is a torch state_dict; nothing else in it is read (data holds pickled code), and nothing
is unpacked to disk. Keys, as of SB3 2.x: DQN q_net.features_extractor.{cnn.{0,2,4},linear.0}, q_net.q_net.0 (and the
same under q_net_target); PPO features_extractor.{cnn.{0,2,4},linear.0}, action_net, value_net (the policy's and the
critic's own names of the extractor repeat it).

torch keeps a convolution as [out, in, height, width], flax as [height, width, in, out]; a dense layer [out, in], flax
[in, out]. The first dense layer reads a flattened [64, 7, 7] there and [7, 7, 64] here, so its rows are permuted.
"""

import io
import zipfile
from pathlib import Path

import numpy as np

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
        data = archive.open("policy.pth").read(MAX_TEACHER_BYTES)
        if zipfile.is_zipfile(io.BytesIO(data)):  # torch's own format since 1.6
            members = zipfile.ZipFile(io.BytesIO(data)).infolist()
            if sum(member.file_size for member in members) > MAX_TEACHER_BYTES:
                raise TeacherError(
                    f"{source}: policy.pth exceeds {MAX_TEACHER_BYTES >> 20} MiB; choose another teacher"
                )
        try:
            import torch
        except ImportError:
            raise TeacherError(
                f"{source}: a model of Stable-Baselines3 needs torch; run pip install torch (its CPU build will do)"
            ) from None
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)  # runs no code of the file
        return from_state({name: tensor.detach().numpy() for name, tensor in state.items()}, source, num_actions)


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
