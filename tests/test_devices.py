"""Several devices and several processes compute the same update as one device."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import flax
import jax
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # for the processes that run this file as a script
import impact_atari
import impact_atari as script
import impala_atari
import ppo_atari
from impact_atari import ActorCritic, Args, Rollout, TrainState

ARGS = Args(frame_size=42, num_envs=8, num_steps=6, num_minibatches=2, norm_adv=True, kl_coef=0.5)
HERE = Path(__file__).resolve()


def update(devices, envs=slice(None)) -> dict[str, np.ndarray]:
    """Parameters after four SGD steps on one fixed batch, of which this process contributes the rows `envs`."""
    rng, (B, T) = np.random.default_rng(0), (ARGS.num_envs, ARGS.num_steps)
    end = rng.random((B, T)) < 0.2
    rollout = Rollout(
        obs=rng.integers(0, 256, (B, T + 1, 4, 42, 42), dtype=np.uint8), action=rng.integers(0, 6, (B, T)),
        logp=np.full((B, T), -1.8, np.float32), reward=rng.normal(size=(B, T)).astype(np.float32),
        discount=np.where(end, 0, 0.99).astype(np.float32), cut=end,
        mask=np.concatenate([np.ones((B, 1), bool), ~end[:, :-1]], axis=1),
    )  # fmt: skip
    mesh = Mesh(devices, "data")
    by_env, replicated = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    network = ActorCritic("shallow", 6)
    params = network.init(jax.random.key(0), rollout.obs[0, :1])
    state = TrainState.create(
        apply_fn=network.apply, params=params, target_params=params, kl_coef=np.float32(0.5), tx=optax.sgd(0.1)
    )
    state = jax.device_put(jax.tree.map(np.array, state), replicated)
    rollout = jax.tree.map(lambda x: jax.make_array_from_process_local_data(by_env, x[envs]), rollout)
    batch = script.evaluate_batch(state, rollout, ARGS)
    rows = script.deal_rows(np.random.default_rng(1), 2, B, ARGS)
    state, _ = script.learn(state, batch, rows, script.impact_loss, ARGS)
    state = script.end_generation(state, (jax.numpy.float32(0.1),), ARGS, update_target=True)
    leaves = jax.tree_util.tree_leaves_with_path(state.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf.addressable_data(0)) for path, leaf in leaves}


@pytest.fixture(scope="module")
def single():
    return update(jax.devices()[:1])


def assert_equal(a, b):
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-5, atol=1e-5, err_msg=name)


def test_two_devices_compute_the_single_device_update(single):
    assert len(jax.devices()) >= 2, "conftest.py asks XLA for two virtual CPU devices"
    assert_equal(update(jax.devices()[:2]), single)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def two_processes(command) -> list[str]:
    """Runs a command twice, as processes 0 and 1 of one job; returns what they printed."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    job_flags = ["--coordinator-address", f"localhost:{free_port()}", "--num-processes", "2", "--process-id"]
    flags = [[*job_flags, str(i)] for i in (0, 1)]
    jobs = [subprocess.Popen([*command, *f], env=env, stdout=-1, stderr=subprocess.STDOUT, text=True) for f in flags]
    outputs = [job.communicate(timeout=400)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, 0], outputs
    return outputs


def test_two_processes_compute_the_single_device_update(single, tmp_path):
    two_processes([sys.executable, str(HERE), str(tmp_path / "update")])
    for i in (0, 1):
        assert_equal(dict(np.load(tmp_path / f"update{i}.npz")), single)


@pytest.mark.parametrize(
    "script", [impact_atari, *(pytest.param(script, marks=pytest.mark.slow) for script in (impala_atari, ppo_atari))],
    ids=lambda module: module.__name__,
)  # fmt: skip
def test_two_processes_train_pong_and_only_one_writes(script, tmp_path):
    outputs = two_processes(
        [sys.executable, script.__file__, "--distributed", "--frame-size", "42", "--num-envs", "4", "--num-steps", "8",
         "--total-timesteps", "320", "--log-every", "64", "--eval-episodes", "1", "--max-episode-steps", "50",
         "--network", "shallow", "--runs-dir", str(tmp_path)]
    )  # fmt: skip
    (run_dir,) = tmp_path.iterdir()
    assert "320" in outputs[0] and "step " not in outputs[1]
    assert (run_dir / "model.msgpack").exists()
    assert (run_dir / "metrics.csv").read_text().splitlines()[-1].startswith("320,")


@pytest.mark.parametrize("script", [impact_atari, impala_atari, ppo_atari], ids=lambda module: module.__name__)
def test_main_on_two_devices_trains_what_it_trains_on_one(script, monkeypatch, tmp_path):
    sgd_step, params = script.sgd_step, {}
    by_turns = {} if script is ppo_atari else {"concurrency": False}
    for devices in ((0,), (0, 1)):

        def spy(state, batch, loss_fn, args, devices=devices):
            (obs,) = (x for x in jax.tree.leaves(batch) if x.dtype == np.uint8)
            assert len(obs.sharding.device_set) == len(devices)
            assert len(obs.addressable_shards[0].data) == len(obs) // len(devices)
            return sgd_step(state, batch, loss_fn, args)

        monkeypatch.setattr(script, "sgd_step", spy)
        args = script.Args(frame_size=42, num_envs=4, num_steps=8, num_minibatches=2, total_timesteps=128,
                           eval_episodes=0, network="shallow", learner_devices=devices,
                           runs_dir=str(tmp_path / str(len(devices))), **by_turns)  # fmt: skip
        result = script.main(args)
        assert result["global_step"] == 128
        model = flax.serialization.msgpack_restore((result["run_dir"] / "model.msgpack").read_bytes())
        params[devices] = flax.traverse_util.flatten_dict(model["params"], sep="/")
    for name, value in params[(0,)].items():
        np.testing.assert_allclose(params[(0, 1)][name], value, rtol=1e-4, atol=1e-5)


def test_no_frame_leaves_its_device():
    """The compiled evaluation and SGD step on two devices move gradients and statistics, never observations."""
    by_env = NamedSharding(Mesh(jax.devices()[:2], "data"), PartitionSpec("data"))
    replicated = NamedSharding(by_env.mesh, PartitionSpec())
    shapes = {"obs": (8, 7, 4, 42, 42)} | {f: (8, 6) for f in "action logp reward discount cut mask".split()}
    kinds = {"obs": np.uint8, "action": np.int32, "cut": bool, "mask": bool}
    zeros = {f: jax.device_put(np.zeros(s, kinds.get(f, np.float32)), by_env) for f, s in shapes.items()}
    network = ActorCritic("shallow", 6)
    params = network.init(jax.random.key(0), np.zeros((1, 4, 42, 42), np.uint8))
    state = TrainState.create(apply_fn=network.apply, params=params, target_params=params, kl_coef=np.float32(0),
                              tx=optax.sgd(0.1))  # fmt: skip
    state = jax.device_put(jax.tree.map(np.array, state), replicated)
    evaluate = script.evaluate_batch.lower(state, Rollout(**zeros), ARGS).compile()
    batch = script.evaluate_batch(state, Rollout(**zeros), ARGS)
    rows = script.deal_rows(np.random.default_rng(0), 1, 8, ARGS)
    choose = script.take_rows.lower(batch, rows[0]).compile()
    step = script.sgd_step.lower(state, script.take_rows(batch, rows[0]), script.impact_loss, ARGS).compile()
    for compiled in (evaluate, choose, step):
        moved = [line for line in compiled.as_text().splitlines() if re.search(r"= u8.* (all-|collective)", line)]
        assert not moved, moved
    assert "all-reduce" in step.as_text()


if __name__ == "__main__":  # a process of the two-process test
    path, *flags = sys.argv[1:]
    given = dict(zip(flags[::2], flags[1::2]))
    rank = int(given["--process-id"])
    jax.distributed.initialize(given["--coordinator-address"], 2, rank)
    half = ARGS.num_envs // 2
    np.savez(f"{path}{rank}.npz", **update(jax.devices(), slice(rank * half, (rank + 1) * half)))
