"""Teachers: each format is written here as its own project writes it, with that project's network stated anew, and
what the loader makes of the file must give the same outputs. Nothing in a file may run, mislead, or exhaust memory."""

import builtins
import gzip
import io
import json
import os
import pickle
import struct
import sys
import zipfile
from collections import OrderedDict
from dataclasses import replace
from types import SimpleNamespace

import envpool
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import impact_atari
import teachers
from teachers import (
    TeacherError,
    dopamine,
    load_replay,
    load_teacher,
    replay_beside,
    restricted_pickle,
    save_replay,
    stable_baselines,
)  # fmt: skip
from teachers.replay import Replay

A = 6
OBS = np.random.default_rng(0).integers(0, 256, (3, 4, 84, 84), np.uint8)


def random_params(init, *args, seed=0):
    """Parameters of the shapes that `init` gives, none of them zero: a forgotten bias shows."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        fan_in = np.prod(x.shape[:-1]) if x.ndim > 1 else 10
        return rng.normal(size=x.shape, scale=fan_in**-0.5).astype(np.float32)

    return jax.tree.map(leaf, jax.eval_shape(init, jax.random.key(0), *args))


def assert_same(teacher, expected, kind):
    expected = np.asarray(expected)
    assert teacher.kind == kind and expected.shape == (len(OBS), A)
    assert np.ptp(expected, axis=0).min() > 1e-3 and np.ptp(expected, axis=1).min() > 1e-2  # else no proof
    np.testing.assert_allclose(teacher.apply(jnp.asarray(OBS)), expected, atol=1e-4, rtol=1e-4)


def changed(tree, path, change):
    """A copy of a nested dict in which the leaf at "a/b/c" is changed."""
    first, _, rest = path.partition("/")
    return {**tree, first: changed(tree[first], rest, change) if rest else change(tree[first])}


# --- the networks of the other projects, in their own layouts ---------------------------------------------------------
# One layer per statement, as they write it: flax numbers layers as they are made, and f(x)(g(y)(z)) makes f before g.
class CleanRLNature(nn.Module):
    """CleanRL's Network: the torso of its QNetwork and of PPO."""

    @nn.compact
    def __call__(self, x):
        x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
        for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding="VALID")(x))
        return nn.relu(nn.Dense(512)(x.reshape(len(x), -1)))


class CleanRLQ(CleanRLNature):
    outputs: int = A

    @nn.compact
    def __call__(self, x):
        x = super().__call__(x)
        return nn.Dense(self.outputs)(x)


class Linear(nn.Module):
    outputs: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(self.outputs)(x)


class ResidualBlock(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        y = nn.Conv(self.channels, (3, 3))(nn.relu(x))
        return x + nn.Conv(self.channels, (3, 3))(nn.relu(y))


class ConvSequence(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.Conv(self.channels, (3, 3))(x), (3, 3), (2, 2), "SAME")
        for _ in range(2):
            x = ResidualBlock(self.channels)(x)
        return x


class CleanRLImpalaQ(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jnp.transpose(x, (0, 2, 3, 1)) / 255.0
        for channels in 16, 32, 32:
            x = ConvSequence(channels)(x)
        x = nn.relu(nn.Dense(256)(nn.relu(x).reshape(len(x), -1)))
        return nn.Dense(A)(x)


class DopamineNature(nn.Module):
    """One state [84, 84, 4] at a time; flax's default padding, which is SAME."""

    outputs: int = A
    padding: str = "SAME"

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32) / 255.0
        for features, size, stride in (32, 8, 4), (64, 4, 2), (64, 3, 1):
            x = nn.relu(nn.Conv(features, (size, size), (stride, stride), padding=self.padding)(x))
        x = nn.relu(nn.Dense(512)(x.reshape(-1)))
        return nn.Dense(self.outputs)(x)


class Stack(nn.Module):
    channels: int

    @nn.compact
    def __call__(self, x):
        x = nn.max_pool(nn.Conv(self.channels, (3, 3))(x), (3, 3), (2, 2), "SAME")
        for _ in range(2):
            y = nn.Conv(self.channels, (3, 3))(nn.relu(x))
            x = x + nn.Conv(self.channels, (3, 3))(nn.relu(y))
        return x


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        for channels in 16, 32, 32:
            x = Stack(channels)(x)
        return nn.relu(x)


class DopamineImpala(nn.Module):
    """The reincarnating_rl networks' encoder, as a DQN."""

    def setup(self):
        self.encoder = Encoder()

    @nn.compact
    def __call__(self, x):
        x = self.encoder(x.astype(jnp.float32) / 255.0)
        x = nn.relu(nn.Dense(512)(x.reshape(-1)))
        return nn.Dense(A)(x)


def dopamine_forward(module, params):
    return jax.vmap(lambda x: module.apply(params, x))(np.moveaxis(OBS, 1, -1))


# --- this project's model.msgpack -------------------------------------------------------------------------------------
def write_ours(path, script, args, params):
    args = json.dumps({"env_id": "Pong-v5", "frame_size": 84} | args)
    model = {"format": f"{script} 1", "args": args, "params": params}
    path.write_bytes(flax.serialization.msgpack_serialize(model))
    return path


@pytest.fixture(scope="module")
def ours():
    """A small model of this project: IMPACT's shallow network."""
    from impact_atari import ActorCritic

    module = ActorCritic("shallow", A)
    return module, random_params(module.init, OBS)


@pytest.mark.parametrize("network", ["shallow", "nature", "resnet"])
def test_actor_critics_of_this_project(tmp_path, network):
    from impact_atari import ActorCritic

    module = ActorCritic(network, A)
    params = random_params(module.init, OBS)
    write_ours(tmp_path / "model.msgpack", "impala_atari", {"episodic_life": True}, params)
    teacher = load_teacher(tmp_path, num_actions=A)
    assert_same(teacher, module.apply(params, OBS)[0], "policy")
    assert teacher.protocol == {"env_id": "Pong-v5", "frame_size": 84, "episodic_life": True, "basis": "recorded"}
    assert teacher.network == network and teacher.source.endswith("model.msgpack")


class OurQ(nn.Module):
    """The Q network that teachers/msgpack_files.py documents for the QDagger scripts, here on the wider resnet."""

    outputs: int

    @nn.compact
    def __call__(self, obs):
        def same(channels):
            return nn.Conv(channels, (3, 3))

        x = jnp.moveaxis(obs, 1, -1) / 255.0
        for channels in (16, 32, 32):
            x = nn.max_pool(same(channels)(x), (3, 3), (2, 2), "SAME")
            for _ in range(2):
                x = x + same(channels)(nn.relu(same(channels)(nn.relu(x))))
        x = nn.relu(nn.Dense(512)(nn.relu(x).reshape(len(x), -1)))
        return nn.Dense(self.outputs)(x)


def test_q_networks_of_this_project(tmp_path):
    module = OurQ(A)
    params = random_params(module.init, OBS)
    path = write_ours(tmp_path / "q.msgpack", "qdagger_dqn_atari", {}, params)
    assert_same(load_teacher(path, num_actions=A), module.apply(params, OBS), "q")

    module = OurQ(A * 11)
    params = random_params(module.init, OBS)
    c51 = {"num_atoms": 11, "v_min": -2.0, "v_max": 5.0}
    path = write_ours(tmp_path / "c51.msgpack", "qdagger_rainbow_atari", c51, params)
    probabilities = nn.softmax(module.apply(params, OBS).reshape(-1, A, 11))
    assert_same(load_teacher(path, num_actions=A), probabilities @ np.linspace(-2.0, 5.0, 11), "c51")


def test_apply_jitted_with_parameters_as_an_argument(tmp_path, ours):
    module, params = ours
    teacher = load_teacher(write_ours(tmp_path / "m", "ppo_atari", {}, params), num_actions=A)
    scores = jax.jit(lambda params, obs: teacher.apply(obs, params))(teacher.params, OBS)
    np.testing.assert_allclose(scores, module.apply(params, OBS)[0], atol=1e-4)
    np.testing.assert_allclose(jax.jit(teacher.apply)(OBS), scores, atol=1e-4)
    zeros = jax.tree.map(jnp.zeros_like, teacher.params)
    assert not teacher.apply(OBS, zeros).any()
    with pytest.raises(AssertionError):
        teacher.apply(OBS[:, :3])
    with pytest.raises(AssertionError):
        teacher.apply(OBS / 255.0)


# --- CleanRL ----------------------------------------------------------------------------------------------------------
def test_cleanrl_dqn(tmp_path):
    params = random_params(CleanRLQ().init, OBS)
    path = tmp_path / "dqn_atari_jax.cleanrl_model"
    path.write_bytes(flax.serialization.to_bytes(flax.core.freeze(params)))
    teacher = load_teacher(str(path), num_actions=A)
    assert_same(teacher, CleanRLQ().apply(params, OBS), "q")
    assert teacher.padding == "VALID" and teacher.protocol["basis"] == "usual"


def test_cleanrl_c51(tmp_path):
    module = CleanRLQ(A * 51)
    params = random_params(module.init, OBS)
    args = {"env_id": "PongNoFrameskip-v4", "n_atoms": 51, "v_min": -10.0, "v_max": 10, "wandb_entity": None}
    path = tmp_path / "c51_atari_jax.cleanrl_model"
    path.write_bytes(flax.serialization.to_bytes({"model_weights": params, "args": args}))
    pmfs = nn.softmax(module.apply(params, OBS).reshape(-1, A, 51), axis=-1)
    teacher = load_teacher(path, num_actions=A)
    assert_same(teacher, (pmfs * np.linspace(-10, 10, 51)).sum(-1), "c51")
    assert teacher.protocol["env_id"] == "PongNoFrameskip-v4"


def test_cleanrl_ppo(tmp_path):
    network, actor, critic = CleanRLNature(), Linear(A), Linear(1)
    hidden = np.zeros((1, 512), np.float32)
    params = [random_params(network.init, OBS), random_params(actor.init, hidden), random_params(critic.init, hidden)]
    path = tmp_path / "ppo_atari_envpool_xla_jax_scan.cleanrl_model"
    path.write_bytes(flax.serialization.to_bytes([{"env_id": "Pong-v5", "target_kl": None}, params]))
    logits = actor.apply(params[1], network.apply(params[0], OBS))
    assert_same(load_teacher(path, num_actions=A), logits, "policy")


def test_cleanrl_qdagger(tmp_path):
    params = random_params(CleanRLImpalaQ().init, OBS)
    path = tmp_path / "qdagger.cleanrl_model"
    path.write_bytes(flax.serialization.to_bytes(params))
    assert_same(load_teacher(path, num_actions=A), CleanRLImpalaQ().apply(params, OBS), "q")


# --- Dopamine's checkpoints -------------------------------------------------------------------------------------------
def bundle(params, **more):
    return {"state": np.zeros((84, 84, 4)), "training_steps": 7, "online_params": params, "target_params": {}} | more


@pytest.mark.parametrize("era", ["FrozenDict of numpy", "dict of jax arrays", "before linen", "protocol 5", "VALID"])
def test_dopamine_dqn(tmp_path, era):
    module = DopamineNature(padding="VALID" if era == "VALID" else "SAME")
    params = tree = random_params(module.init, OBS[0].transpose(1, 2, 0))
    if era == "FrozenDict of numpy":
        tree = flax.core.freeze(params)
    elif era == "dict of jax arrays":
        tree = jax.tree.map(jnp.asarray, params)
    elif era == "before linen":
        tree = {
            name.replace("Dense_0", "Dense_3").replace("Dense_1", "Dense_4"): x for name, x in params["params"].items()
        }
    logs = {"iteration_0": {"return": [np.float64(1.5)], "game": np.array(["Pong"])}, "time": SimpleNamespace(x=1)}
    optimizer_state = optax.adam(1e-4).init({"w": jnp.ones(3)})
    data = pickle.dumps(bundle(tree, logs=logs, optimizer_state=optimizer_state), protocol=5 if "5" in era else 4)
    (tmp_path / "ckpt.199").write_bytes(data)
    teacher = load_teacher(tmp_path / "ckpt.199", num_actions=A)
    assert_same(teacher, dopamine_forward(module, params), "q")
    assert teacher.padding == module.padding and teacher.protocol["repeat_action_probability"] == 0.25


def test_dopamine_c51(tmp_path):
    module = DopamineNature(A * 51)
    params = random_params(module.init, OBS[0].transpose(1, 2, 0))
    (tmp_path / "ckpt.199").write_bytes(pickle.dumps(bundle(params)))
    probabilities = nn.softmax(dopamine_forward(module, params).reshape(-1, A, 51))
    teacher = load_teacher(tmp_path / "ckpt.199", num_actions=A)
    assert_same(teacher, (probabilities * np.linspace(-10, 10, 51)).sum(-1), "c51")


def test_dopamine_impala(tmp_path):
    params = random_params(DopamineImpala().init, OBS[0].transpose(1, 2, 0))
    (tmp_path / "ckpt.9").write_bytes(pickle.dumps(bundle(params)))
    assert_same(load_teacher(tmp_path / "ckpt.9", num_actions=A), dopamine_forward(DopamineImpala(), params), "q")


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------
def sb3_state(kind):
    """A state_dict as numpy arrays in torch's layout, and its outputs by a forward pass in that layout (NCHW)."""
    prefix, head = "features_extractor.", "action_net"
    if kind == "q":
        prefix, head = "q_net.features_extractor.", "q_net.q_net.0"
    shapes = {"cnn.0": (32, 4, 8, 8), "cnn.2": (64, 32, 4, 4), "cnn.4": (64, 64, 3, 3), "linear.0": (512, 3136)}
    shapes = {prefix + name: shape for name, shape in shapes.items()} | {head: (A, 512)}
    rng, state = np.random.default_rng(1), {}
    for name, shape in shapes.items():
        state[f"{name}.weight"] = rng.normal(size=shape, scale=np.prod(shape[1:]) ** -0.5).astype(np.float32)
        state[f"{name}.bias"] = rng.normal(size=shape[0], scale=0.3).astype(np.float32)
    x = OBS / np.float32(255)
    for i, stride in (0, 4), (2, 2), (4, 1):
        weight, bias = state[f"{prefix}cnn.{i}.weight"], state[f"{prefix}cnn.{i}.bias"]
        x = jax.lax.conv(x, weight, (stride, stride), "VALID")  # in this layout by default
        x = np.maximum(x + bias[:, None, None], 0)
    for name in f"{prefix}linear.0", head:
        outputs = x.reshape(len(x), -1) @ state[f"{name}.weight"].T + state[f"{name}.bias"]
        x = np.maximum(outputs, 0)
    if kind == "q":
        state |= {f"q_net_target.{name.removeprefix('q_net.')}": x + 1 for name, x in state.items()}
    else:
        state |= {f"{who}_{name}": x for who in ("pi", "vf") for name, x in state.items() if name.startswith(prefix)}
        state |= {"value_net.weight": np.ones((1, 512), np.float32), "value_net.bias": np.ones(1, np.float32)}
    return state, outputs


def write_sb3(path, policy):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("data", json.dumps({"policy_class": {":serialized:": "gASVMA=="}}))
        archive.writestr("../../outside.txt", "an archive must not write outside")
        archive.writestr("policy.pth", policy)
        archive.writestr("_stable_baselines3_version", "2.3.0")
    return path


class FloatStorage:
    """torch's type of a storage, as its files name it."""

    __module__ = "torch"


def _rebuild_tensor_v2(*_):
    """The function by which torch's files rebuild a tensor."""


_rebuild_tensor_v2.__module__ = "torch._utils"


class TorchPickler(pickle.Pickler):
    """Writes arrays as torch.save writes contiguous tensors: their numbers aside, in `storages`."""

    def __init__(self, file):
        super().__init__(file, protocol=2)
        self.storages = []

    def persistent_id(self, thing):
        return thing if isinstance(thing, tuple) and thing[:1] == ("storage",) else None

    def reducer_override(self, thing):
        if not isinstance(thing, np.ndarray):
            return NotImplemented
        self.storages.append(thing.tobytes())
        storage = ("storage", FloatStorage, str(len(self.storages) - 1), "cpu", thing.size)
        strides = tuple(step // thing.itemsize for step in thing.strides)
        return _rebuild_tensor_v2, (storage, 0, thing.shape, strides, False, OrderedDict())


def torch_save(state, monkeypatch):
    """The bytes of torch.save(state), written independently of torch."""
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(FloatStorage=FloatStorage))
    monkeypatch.setitem(sys.modules, "torch._utils", SimpleNamespace(_rebuild_tensor_v2=_rebuild_tensor_v2))
    pickled, file = io.BytesIO(), io.BytesIO()
    pickler = TorchPickler(pickled)
    pickler.dump(OrderedDict(state))
    monkeypatch.setitem(sys.modules, "torch", None)  # reading needs no torch
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("policy/data.pkl", pickled.getvalue())
        archive.writestr("policy/byteorder", "little")
        for i, data in enumerate(pickler.storages):
            archive.writestr(f"policy/data/{i}", data)
        archive.writestr("policy/version", "3\n")
    return file.getvalue()


def npz(arrays):
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["q", "policy"])
def test_stable_baselines(tmp_path, monkeypatch, kind):
    state, outputs = sb3_state(kind)
    (tmp_path / "a" / "b").mkdir(parents=True)
    path = write_sb3(tmp_path / "a" / "b" / "dqn-PongNoFrameskip-v4.zip", torch_save(state, monkeypatch))
    assert_same(load_teacher(path, num_actions=A), outputs, kind)
    assert not list(tmp_path.rglob("outside.txt"))


@pytest.mark.parametrize("kind", ["q", "policy"])
def test_stable_baselines_with_torch(tmp_path, kind):
    torch = pytest.importorskip("torch")
    state, outputs = sb3_state(kind)
    file = io.BytesIO()
    torch.save({name: torch.from_numpy(x) for name, x in state.items()}, file)
    assert_same(load_teacher(write_sb3(tmp_path / "m.zip", file.getvalue()), num_actions=A), outputs, kind)


def test_stable_baselines_refuses(tmp_path, monkeypatch):
    state, _ = sb3_state("q")

    def refused(state, match):
        policy = state if isinstance(state, bytes) else torch_save(state, monkeypatch)
        with pytest.raises(TeacherError, match=match):
            load_teacher(write_sb3(tmp_path / "m.zip", policy), num_actions=A)

    with pytest.raises(TeacherError, match="6 actions, the game has 4"):
        load_teacher(write_sb3(tmp_path / "m.zip", torch_save(state, monkeypatch)), num_actions=4)
    deeper = state | {"q_net.q_net.2.weight": np.ones((A, A), np.float32), "q_net.q_net.2.bias": np.ones(A, np.float32)}
    refused(deeper, r"m\.zip: not CnnPolicy's default network \(see q_net\.q_net\.2\)")
    refused({"actor.mu.weight": np.ones(1, np.float32)}, "choose a DQN or PPO with CnnPolicy")
    name = "q_net.q_net.0.weight"
    refused(state | {name: state[name].T}, "has the strides")  # a tensor that is not contiguous
    refused({name: Weapon(os.mkdir, str(tmp_path / "run"))}, "choose a DQN or PPO")
    assert not (tmp_path / "run").exists()
    refused(b"\x80\x02}q\x00.", "before 1.6")  # torch's older format, a bare pickle
    whole = torch_save(state, monkeypatch)
    refused(whole[: len(whole) // 2], "before 1.6|truncated, damaged")
    with pytest.raises(TeacherError, match="without policy.pth"):  # a torch file of CleanRL begins like this
        (tmp_path / "dqn_atari.cleanrl_model").write_bytes(npz(state))
        load_teacher(tmp_path / "dqn_atari.cleanrl_model", num_actions=A)
    with pytest.raises(TeacherError, match="truncated, damaged"):
        (tmp_path / "m.zip").write_bytes(write_sb3(tmp_path / "m.zip", whole).read_bytes()[:-500])
        load_teacher(tmp_path / "m.zip", num_actions=A)
    bomb = io.BytesIO()
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    monkeypatch.setattr(stable_baselines, "MAX_TEACHER_BYTES", 10**5)
    refused(bomb.getvalue(), "policy.pth exceeds")


# --- what a teacher is refused for ------------------------------------------------------------------------------------
def widen(x):
    return np.zeros((x.shape[0] + 1, *x.shape[1:]), x.dtype)


@pytest.mark.parametrize(
    "path, change, message",
    [
        (
            "Conv_1/kernel",
            widen,
            r"Conv_1/kernel has shape \(5, 4, 16, 32\), the shallow network needs \(4, 4, 16, 32\)",
        ),
        ("Conv_0/bias", widen, r"Conv_0/bias has shape \(17,\), the shallow network needs \(16,\)"),
        (
            "Dense_0/kernel",
            lambda x: x[:1152],
            r"1,152 rows, the shallow network needs 2,592 \(VALID padding\) or 3,872",
        ),
        ("Dense_0/bias", widen, "Dense_0/bias has shape"),
        ("Dense_1/kernel", lambda x: x[:, :4], "teacher has 4 actions, the game has 6"),
        ("Dense_1/kernel", lambda x: x[:99], r"Dense_1/kernel has shape \(99, 6\)"),
        ("Dense_1/bias", lambda x: x[:4], "Dense_1/bias has shape"),
        ("Dense_2/kernel", lambda x: x[:, [0, 0]], "Dense_2/kernel has shape"),
        ("Dense_2", lambda x: {"kernel": x["kernel"]}, "Dense_2/kernel is no tree of layers"),
        ("Conv_1/kernel", lambda x: x.astype(np.int32), "not an array of floats"),
        ("Conv_1/kernel", lambda x: x * np.nan, "Conv_1/kernel holds NaN"),
    ],
)
def test_every_leaf_is_checked(tmp_path, ours, path, change, message):
    params = changed(ours[1], f"params/{path}", change)
    with pytest.raises(TeacherError, match=message) as error:
        load_teacher(write_ours(tmp_path / "m.msgpack", "impact_atari", {}, params), num_actions=A)
    assert str(error.value).startswith(str(tmp_path / "m.msgpack")) and "\n" not in str(error.value)


def test_other_and_damaged_files_are_refused(tmp_path, ours, monkeypatch):
    path = tmp_path / "m.msgpack"

    def refuses(message, num_actions=A):
        with pytest.raises(TeacherError, match=message) as error:
            load_teacher(path, num_actions=num_actions)
        assert str(path) in str(error.value) and "\n" not in str(error.value)

    refuses("no such file")
    write_ours(path, "impact_atari", {}, ours[1])
    refuses("6 actions, the game has 18", num_actions=18)
    whole = path.read_bytes()
    for data in whole[: len(whole) // 2], whole[:-1], b"", b"not a model at all", b"\x80\x04":
        path.write_bytes(data)
        refuses("truncated, damaged|no known format")
    write_ours(path, "impact_mujoco", {}, ours[1])
    refuses("format 'impact_mujoco 1' is unknown")
    write_ours(path, "impact_atari", {"frame_size": 42}, ours[1])
    refuses(r"has shape \(8, 8, 4, ")
    write_ours(path, "qdagger_rainbow_atari", {"noisy": True, "dueling": False}, ours[1])
    refuses("trained with --noisy or --dueling")
    write_ours(path, "impact_atari", {}, {"params": ours[1]["params"] | {"Noisy_0": {"kernel": 1, "bias": 2}}})
    refuses("unknown network with the layers Conv_0, Conv_1, Dense_0, Dense_1, Dense_2, Noisy_0")
    write_ours(path, "qdagger_rainbow_atari", {"num_atoms": 10**12, "v_min": 0.0, "v_max": 1.0}, {"params": {
        name: layer for name, layer in ours[1]["params"].items() if name != "Dense_2"}})  # fmt: skip
    refuses("no C51 support")
    path.write_bytes(flax.serialization.to_bytes([{"params": {}}, {"params": {}}]))  # as of CleanRL's DDPG
    refuses("truncated, damaged|no known format")
    nested = {}
    for _ in range(7):
        nested = {"a": nested, "b": nested, "c": nested}
    path.write_bytes(flax.serialization.msgpack_serialize({"params": nested}))
    refuses("no tree of layers")
    monkeypatch.setattr(teachers, "MAX_TEACHER_BYTES", 10)
    refuses("larger than")
    path.unlink()
    with pytest.raises(TeacherError, match=r"no model\.msgpack in it"):
        load_teacher(tmp_path, num_actions=A)


def test_dopamine_checkpoints_of_other_agents_are_refused(tmp_path):
    path = tmp_path / "ckpt.1"
    params = random_params(DopamineNature(A * 200).init, OBS[0].transpose(1, 2, 0))  # a quantile agent's head
    path.write_bytes(pickle.dumps(bundle(params)))
    with pytest.raises(
        TeacherError, match=r"1200 outputs, a game of 6 actions needs 6 \(DQN\) or 306 \(C51, Rainbow\)"
    ):
        load_teacher(path, num_actions=A)
    path.write_bytes(pickle.dumps({"training_steps": 3}))
    with pytest.raises(TeacherError, match="without online_params"):
        load_teacher(path, num_actions=A)


# --- pickles that want to run something -------------------------------------------------------------------------------
class Weapon:
    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_no_pickle_runs_code(tmp_path):
    mark = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Weapon(os.mkdir, str(mark))))
    assert mark.exists()  # so the weapon works
    mark.rmdir()
    params = random_params(DopamineNature().init, OBS[0].transpose(1, 2, 0))
    path = tmp_path / "ckpt.1"
    for weapon in (
        Weapon(os.mkdir, str(mark)),
        Weapon(eval, f"__import__('os').mkdir({str(mark)!r})"),
        Weapon(getattr, Weapon(builtins.__import__, "os"), "system"),
        Weapon(Weapon, Weapon(exec, f"open({str(mark)!r}, 'w')")),
    ):
        path.write_bytes(pickle.dumps(bundle(params, logs=[weapon, {"more": weapon}])))
        assert load_teacher(path, num_actions=A).kind == "q"  # the rest of the file is good
        for data in weapon, bundle(weapon), bundle(changed(params, "params/Conv_0/kernel", lambda x, w=weapon: w)):
            path.write_bytes(pickle.dumps(data))
            with pytest.raises(TeacherError):
                load_teacher(path, num_actions=A)
    assert not mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x82\x01.",  # an extension code: a global by number
        b"\x80\x04cnumpy\ndtype\n}\x8c\x05valueK\x01sb.",  # sets an attribute of the stand-in itself
        b"\x80\x04cnumpy.core.multiarray\nscalar\nN}\x8c\x05valueK\x01s\x86b.",  # likewise, as slots
        b"\x80\x04Nr\xff\xff\xff\x7f.",  # the unpickler would take 16 GB for a memo of 2**31 entries
        b"\x80\x05\x96" + struct.pack("<Q", 10**11) + b".",  # a bytearray of 100 GB
        b"\x80\x04Q.",  # a persistent id
        b"\x80\x04)" + b"2\x86" * 60 + b"}\x94h\x00.",  # tuples of twice the same, 60 deep: they double by DUP
        b"\x80\x04(c__builtin__\nint\n",  # truncated
    ],
)
def test_hostile_pickles_are_refused(tmp_path, data):
    with pytest.raises((ValueError, TypeError, pickle.UnpicklingError, EOFError)):
        restricted_pickle.loads(data)
    assert not isinstance(restricted_pickle.Dtype.value, int) and not hasattr(restricted_pickle.Scalar, "value")
    (tmp_path / "ckpt.1").write_bytes(data)
    with pytest.raises(TeacherError, match="truncated, damaged"):
        load_teacher(tmp_path / "ckpt.1", num_actions=A)


def test_restricted_pickle_reads_arrays_of_every_kind():
    arrays = [np.arange(6, dtype=">i4").reshape(2, 3), np.ones((2, 3), order="F"), np.zeros((0, 3)), np.array(True)]
    for protocol in 3, 4, 5:
        got = restricted_pickle.loads(pickle.dumps(arrays, protocol))
        for x, y in zip(arrays, got, strict=True):
            np.testing.assert_array_equal(x, y.value)
        assert restricted_pickle.loads(pickle.dumps([np.int64(3), 2**70], protocol)) == [3, 2**70]
    lie = pickle.dumps(np.zeros(4), 4).replace(b"K\x04\x85", b"K\x40\x85")  # shape (4,) becomes (64,)
    with pytest.raises(ValueError, match="32 bytes"):
        restricted_pickle.loads(lie)


@pytest.mark.parametrize("path", ["~nobody-of-this-name/model", "x" * 300])
def test_impossible_paths(path):
    for load in load_teacher, load_replay:
        with pytest.raises(TeacherError, match="no such file or folder"):
            load(path, num_actions=A)


# --- the hub, the bundled teacher, the scores -------------------------------------------------------------------------
def test_hub(tmp_path, ours, monkeypatch):
    address = "hf://cleanrl/Pong-v5-ppo-seed1/some/model.msgpack"
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(TeacherError, match="pip install huggingface-hub, or download the file yourself"):
        load_teacher(address, num_actions=A)

    def offline(repo, file):
        raise FileNotFoundError("cannot find the file on the disk\nand outgoing traffic is disabled")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=offline))
    with pytest.raises(TeacherError, match="neither cached nor downloadable .*pass its path"):
        load_teacher(address, num_actions=A)

    def download(repo, file):
        assert (repo, file) == ("cleanrl/Pong-v5-ppo-seed1", "some/model.msgpack")
        return str(write_ours(tmp_path / "cached", "ppo_atari", {}, ours[1]))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=download))
    assert load_teacher(address, num_actions=A).source == address
    for bad in "hf://cleanrl", "hf://cleanrl/repo", "hf://cleanrl/repo/../../file":
        with pytest.raises(TeacherError, match="hf://owner/repo/file"):
            load_teacher(bad, num_actions=A)


def test_bundled_teacher_and_scores():
    with pytest.raises(TeacherError, match="no bundled teacher"):
        teachers.bundled_teacher("Skiing-v5")
    assert len(teachers.SCORES) == 11 and all(score.random < score.human for score in teachers.SCORES.values())
    assert teachers.scores_of("Pong-v5") == (-20.7, 14.6) and teachers.scores_of("Breakout-v5").human == 30.5
    with pytest.raises(TeacherError, match="Skiing-v5: no random"):
        teachers.scores_of("Skiing-v5")


# --- replay data ------------------------------------------------------------------------------------------------------
def frame(number):
    """A frame like no other, without a zero."""
    pixels = np.full((84, 84), 1 + number % 250, np.uint8)
    pixels[0, :2] = 1 + number // 250, 1 + number % 250
    return pixels


class DopamineBuffer:
    """Dopamine's circular buffer, as far as it writes: three rows of zeros before each episode, then its steps."""

    def __init__(self, capacity):
        self.capacity, self.rows, self.begins = capacity, [], True
        self.store = {
            "observation": np.full((capacity, 84, 84), 77, np.uint8),  # numpy.empty's rubbish
            "action": np.full(capacity, 77, np.int32),
            "reward": np.full(capacity, 77, np.float32),
            "terminal": np.full(capacity, 1, np.uint8),
        }

    def write(self, row):
        at = len(self.rows) % self.capacity
        for name, column in self.store.items():
            column[at] = row[name]
        self.rows.append(row)

    def add(self, observation, action, reward, terminal, episode_end):
        for _ in range(3 if self.begins else 0):
            zeros = np.zeros((84, 84), np.uint8)
            self.write(dict(observation=zeros, action=0, reward=0.0, terminal=0, end=False, padding=True))
        row = dict(
            observation=observation, action=action, reward=reward, terminal=terminal, end=episode_end, padding=False
        )
        self.write(row)
        self.begins = episode_end

    def save(self, folder, suffix=399):
        oldest = max(0, len(self.rows) - self.capacity)
        ends = {np.int64(i % self.capacity) for i in range(oldest, len(self.rows)) if self.rows[i]["end"]}
        for name, array in {f"$store$_{name}": x for name, x in self.store.items()}.items():
            with gzip.open(folder / f"{name}_ckpt.{suffix}.gz", "wb", compresslevel=1) as file:
                np.save(file, array, allow_pickle=False)
        with gzip.open(folder / f"add_count_ckpt.{suffix}.gz", "wb") as file:
            np.save(file, np.array(len(self.rows)), allow_pickle=False)
        with gzip.open(folder / f"episode_end_indices_ckpt.{suffix}.gz", "wb") as file:
            pickle.dump(ends, file)
        return folder


def play(capacity, steps, seed):
    """Short episodes with both kinds of ends; the last one goes on."""
    rng, buffer = np.random.default_rng(seed), DopamineBuffer(capacity)
    for step in range(steps):
        end = rng.random() < 0.2
        terminal = end and rng.random() < 0.6
        buffer.add(frame(step), rng.integers(A), float(rng.integers(-1, 2)), int(terminal), bool(end))
    return buffer


def expected_windows(rows, low, high, n):
    """All n-step windows that lie in rows [low, high), by walking along each: (stack, actions, rewards, next frame)."""
    windows = []
    for t in range(low + 3, high):
        window = []
        for row in rows[t : min(t + n, high)]:
            window.append(row)
            if row["end"]:
                break
        ended = window[-1]["end"]
        if rows[t]["padding"] or ended and not window[-1]["terminal"] or not ended and t + n >= high:
            continue
        stack = rows[t - 3 : t + 1]
        if low == 0 or not all(row["padding"] for row in rows[low : max(t - 2, low + 1)]):
            # The first frame fills the stack instead of zeros. (Where the data begin amid these, they pass for frames.)
            first = next(row for row in stack if not row["padding"])
            stack = [first if row["padding"] else row for row in stack]
        stack = np.stack([row["observation"] for row in stack])
        following = None if ended else rows[t + n]["observation"]
        windows.append((stack, [row["action"] for row in window], [row["reward"] for row in window], following))
    return windows


def found_windows(replay, n):
    windows = []
    for t in np.flatnonzero(replay.usable(n)):
        m = next((k + 1 for k in range(n) if replay.terminated[t + k]), n)
        ended = replay.terminated[t + m - 1]
        rewards = [float(x) for x in replay.reward[t : t + m]]
        following = None if ended else replay.frames[t + n]
        windows.append((replay.stack(np.array([t]))[0], replay.action[t : t + m].tolist(), rewards, following))
    return windows


def assert_same_windows(found, expected):
    assert len(found) == len(expected)
    for (stack, actions, rewards, following), wanted in zip(found, expected, strict=True):
        np.testing.assert_array_equal(stack, wanted[0])
        assert actions == wanted[1] and rewards == wanted[2] and (following is None) == (wanted[3] is None)
        if following is not None:
            np.testing.assert_array_equal(following, wanted[3])


@pytest.mark.parametrize("capacity, steps", [(60, 25), (60, 40), (60, 90), (60, 91), (60, 92), (60, 93), (47, 200)])
def test_dopamine_replay_against_a_walk_through_the_rows(tmp_path, capacity, steps):
    buffer = play(capacity, steps, seed=steps)
    total, low = len(buffer.rows), max(0, len(buffer.rows) - capacity)
    buffer.save(tmp_path)
    replay = load_replay(tmp_path, num_actions=A)
    for n in 1, 3:
        expected = expected_windows(buffer.rows, low, total, n)
        assert len(expected) > 5
        assert_same_windows(found_windows(replay, n), expected)
    assert replay.truncated.any() and replay.terminated.any() and not (replay.truncated & replay.terminated).any()
    assert replay.protocol["reward_clip"] and "399" in replay.source
    for start, count in (0, 12), (5, 20), (11, total - low - 11):
        part = load_replay(tmp_path, num_actions=A, start=start, count=count)
        expected = expected_windows(buffer.rows, low + start, low + start + count, 3)
        assert_same_windows(found_windows(part, 3), expected)


def test_dopamine_replay_without_episode_ends(tmp_path):
    """Old data: the zeros after a time-out look like frames, so only data in which all ends are terminal is exact."""
    buffer = DopamineBuffer(60)
    for step in range(50):
        end = step % 7 == 6
        buffer.add(frame(step), step % A, 1.0, int(end), end)
    buffer.save(tmp_path)
    (tmp_path / "episode_end_indices_ckpt.399.gz").unlink()
    expected = expected_windows(buffer.rows, len(buffer.rows) - 60, len(buffer.rows), 3)
    assert_same_windows(found_windows(load_replay(tmp_path, num_actions=A), 3), expected)


def test_a_slice_does_not_read_the_rest(tmp_path):
    buffer = play(60, 30, seed=3)
    rng = np.random.default_rng(0)
    real = [i for i, row in enumerate(buffer.rows[:60]) if not row["padding"]]
    buffer.store["observation"][real] = rng.integers(1, 256, (len(real), 84, 84), np.uint8)  # random: does not compress
    path = buffer.save(tmp_path) / "$store$_observation_ckpt.399.gz"
    assert len(buffer.rows) <= 60
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])
    part = load_replay(tmp_path, num_actions=A, count=12)
    np.testing.assert_array_equal(part.frames[part.first][0], buffer.store["observation"][3])
    with pytest.raises(TeacherError, match="truncated"):
        load_replay(tmp_path, num_actions=A)


def test_dopamine_replay_refuses(tmp_path, monkeypatch):
    def refuses(message, path=tmp_path, num_actions=A, **range_):
        with pytest.raises(TeacherError, match=message) as error:
            load_replay(path, num_actions=num_actions, **range_)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)

    def write(name, array):
        with gzip.open(tmp_path / f"{name}_ckpt.399.gz", "wb") as file:
            np.save(file, array)

    refuses("no replay data")
    refuses("no such folder", tmp_path / "nowhere")
    buffer = play(60, 30, seed=1)
    buffer.save(tmp_path)
    refuses("holds actions from 0 to 5, the game has 4", num_actions=4)
    refuses("rows, not 90 from row 0", count=90)
    refuses("rows, not 5 from row 5[0-9]", start=-1, count=5)
    buffer.save(tmp_path, suffix=400)
    refuses(r"holds the replays 399, 400; name the observation file of one")
    load_replay(tmp_path / "$store$_observation_ckpt.400.gz", num_actions=A)
    (tmp_path / "$store$_observation_ckpt.400.gz").unlink()

    monkeypatch.setattr(dopamine, "MAX_PICKLE_BYTES", 20)
    refuses("episode_end_indices is larger")
    monkeypatch.undo()
    with gzip.open(tmp_path / "episode_end_indices_ckpt.399.gz", "wb") as file:
        pickle.dump(Weapon(os.mkdir, str(tmp_path / "it ran")), file)
    refuses("episode_end_indices: truncated, damaged")
    assert not (tmp_path / "it ran").exists()
    buffer.save(tmp_path)

    write("$store$_observation", np.zeros((60, 64, 64), np.uint8))
    refuses("holds uint8 .60, 64, 64., not uint8 .N, 84, 84.")
    buffer.save(tmp_path)
    write("$store$_action", buffer.store["action"].astype(object))
    refuses("action: holds object")
    write("$store$_action", buffer.store["action"][:50])
    refuses("action has not as many rows")
    buffer.save(tmp_path)
    write("$store$_reward", np.full(60, np.nan, np.float32))
    refuses("begins without three rows of zeros")
    write("$store$_reward", np.where(buffer.store["action"] == 3, np.float32(np.nan), 0).astype(np.float32))
    refuses("rewards that are not finite")
    (tmp_path / "$store$_reward_ckpt.399.gz").unlink()
    refuses("reward_ckpt.399.gz: no such file")
    buffer.save(tmp_path)
    (tmp_path / "$store$_terminal_ckpt.399.gz").write_bytes(b"no gzip file")
    refuses("terminal: truncated, damaged")
    buffer.save(tmp_path)
    with gzip.open(tmp_path / "$store$_observation_ckpt.399.gz", "wb") as file:  # promises 7 TB
        np.lib.format.write_array_header_1_0(file, dict(descr="|u1", fortran_order=False, shape=(10**9, 84, 84)))
    write("add_count", np.array(10**9))
    refuses("frames need 7,056 GB; read a part")


def hand_made():
    """Two environments: [0..4] an episode's tail that terminates, [5..9] one that a time limit cuts; then the second
    one's [10..13], with its beginning, still running when it was saved."""
    flags = {name: np.zeros(14, bool) for name in ("terminated", "truncated", "first")}
    flags["terminated"][4] = flags["truncated"][[9, 13]] = flags["first"][[5, 10]] = True
    frames = np.stack([frame(i) for i in range(14)])
    action, reward = np.arange(14, dtype=np.int32) % A, np.linspace(-1, 1, 14, dtype=np.float32)
    return Replay(frames, action, reward, **flags, protocol={"env_id": "Pong-v5", "reward_clip": True}, source="hand")


def test_replay_by_hand():
    replay = hand_made()
    assert np.flatnonzero(replay.usable(1)).tolist() == [3, 4, 5, 6, 7, 8, 10, 11, 12]
    assert np.flatnonzero(replay.usable(3)).tolist() == [3, 4, 5, 6, 10]
    stack = replay.stack(np.array([4, 6]))
    np.testing.assert_array_equal(stack[0], replay.frames[1:5])
    np.testing.assert_array_equal(stack[1], replay.frames[[5, 5, 5, 6]])


def save(folder, replay, rows_per_shard):
    names = "frames", "action", "reward", "terminated", "truncated", "first"
    slices = [slice(i, i + rows_per_shard) for i in range(0, len(replay.action), rows_per_shard)]
    parts = [replace(replay, **{name: getattr(replay, name)[rows] for name in names}) for rows in slices]
    save_replay(folder, parts, len(parts))


def test_shards(tmp_path):
    replay = hand_made()
    save(tmp_path / "run" / "replay", replay, rows_per_shard=5)
    assert len(list((tmp_path / "run" / "replay").iterdir())) == 3
    for start, count in (0, None), (0, 3), (5, 5), (3, 9), (13, 1):
        got = load_replay(tmp_path / "run", num_actions=A, start=start, count=count)
        rows = slice(start, None if count is None else start + count)
        for name in "frames", "action", "reward", "terminated", "truncated", "first":
            assert getattr(got, name).dtype == getattr(replay, name).dtype
            np.testing.assert_array_equal(getattr(got, name), getattr(replay, name)[rows])
        assert got.protocol == replay.protocol
    newest = load_replay(tmp_path / "run", num_actions=A, start=-6)  # of each of the three shards two
    np.testing.assert_array_equal(newest.frames, replay.frames[[3, 4, 8, 9, 12, 13]])
    assert len(load_replay(tmp_path / "run", num_actions=A, start=-400).action) == 14
    assert replay_beside(tmp_path / "run") == tmp_path / "run" / "replay" and replay_beside(tmp_path) is None
    assert replay_beside(tmp_path / "run" / "model.msgpack") == tmp_path / "run" / "replay"
    with pytest.raises(TeacherError, match="holds replay data already"):
        save_replay(tmp_path / "run" / "replay", [replay], 1)
    for i, protocol in enumerate((None, [], {"env_id": 5})):
        save(tmp_path / str(i), replace(replay, protocol=protocol), rows_per_shard=14)
        with pytest.raises(TeacherError):
            load_replay(tmp_path / str(i), num_actions=A)


def test_a_replay_is_saved_whole_or_not_at_all(tmp_path):
    def parts():
        yield hand_made()
        raise KeyboardInterrupt

    for _ in range(2):  # what the first has left behind does not hinder the second
        with pytest.raises(KeyboardInterrupt):
            save_replay(tmp_path / "replay", parts(), 2)
        assert not (tmp_path / "replay").exists()
    save(tmp_path / "replay", hand_made(), rows_per_shard=7)
    assert [path.name for path in tmp_path.iterdir()] == ["replay"]


def test_shards_refused(tmp_path):
    def refuses(message, **more):
        with pytest.raises(TeacherError, match=message) as error:
            load_replay(tmp_path, **{"num_actions": A} | more)
        assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)

    save(tmp_path, hand_made(), rows_per_shard=7)
    first, second = sorted(tmp_path.iterdir())
    refuses("the game has 3", num_actions=3)
    refuses("holds 14 rows, not 9 from row 10", start=10, count=9)
    with pytest.raises(TeacherError, match="read with the others of its folder"):
        load_replay(first, num_actions=A)
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    refuses("truncated, damaged")
    second.unlink()
    refuses("shards are missing")
    np.savez(first, frames=np.zeros((3, 84, 84), np.uint8))
    refuses("truncated, damaged or of another format .*meta")

    def lie(rows, body):
        """A shard whose headers promise `rows` rows of zeros and whose bodies have `body`."""
        meta = json.dumps({"format": "replay 1", "shard": 0, "shards": 1}).encode()
        with zipfile.ZipFile(first, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, (dtype, row_shape) in {"meta": (np.uint8, ()), **teachers.replay.COLUMNS}.items():
                shape = (len(meta),) if name == "meta" else (rows, *row_shape)
                header = {"descr": np.dtype(dtype).str, "fortran_order": False, "shape": shape}
                with archive.open(f"{name}.npy", "w") as file:
                    np.lib.format.write_array_header_1_0(file, header)
                    file.write(
                        meta if name == "meta" else bytes(body * np.dtype(dtype).itemsize * int(np.prod(row_shape)))
                    )

    lie(3, 3)
    assert len(load_replay(tmp_path, num_actions=A).action) == 3
    lie(10**9, 3)
    refuses("need 7,056 GB")
    lie(8, 3)
    refuses("truncated, its header promises 8 rows")
    lie(3, 8)
    refuses("holds more than the 3 rows")


def test_the_bundled_teacher_and_frames_of_42():
    """It learned from frames of 42 x 42; EnvPool's are means of 2 x 2 pixels of those of 84 x 84, to a grey level."""
    path = teachers.bundled_teacher("Pong-v5")
    assert path.stat().st_size < 4 * 2**20
    facts = json.loads(path.with_suffix(".json").read_text())
    assert {"command", "commit", "seed", "date", "scores"} <= facts.keys()
    teacher = load_teacher(path, num_actions=6)
    assert teacher.frame_size == 42
    network, model = impact_atari.ActorCritic("shallow", 6), flax.serialization.msgpack_restore(path.read_bytes())
    envs = [
        envpool.make("Pong-v5", env_type="gymnasium", num_envs=1, seed=3, img_height=size, img_width=size)
        for size in (84, 42)
    ]
    large, small = (env.reset()[0] for env in envs)
    for action in np.random.default_rng(0).integers(0, 6, (60, 1)):
        means = large.reshape(1, 4, 42, 2, 42, 2).mean((3, 5))
        assert np.abs(means - small).max() <= 1.0
        np.testing.assert_allclose(teacher.apply(large), network.apply(model["params"], small)[0], atol=0.3)
        large, small = (env.step(action)[0] for env in envs)
    with pytest.raises(TeacherError, match="no bundled teacher"):
        teachers.bundled_teacher("Qbert-v5")
