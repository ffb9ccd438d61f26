"""What goes wrong in real life: dead threads, kills, damaged files, NaN, bad flags."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import flax
import jax
import numpy as np
import pytest
import tyro
from micro_envs import MatchTheBit, RightAction, at_call, die, install

import impact_atari
import impala_atari
import ppo_atari

SGD_STEPS = {impact_atari: 2, impala_atari: 1, ppo_atari: 4 * 4}  # per rollout, by default
SMALL = dict(frame_size=42, num_envs=4, num_steps=8, eval_episodes=0, log_every=32, checkpoint_every=32,
             network="shallow")  # fmt: skip


@pytest.fixture(scope="module", params=SGD_STEPS, ids=lambda module: module.__name__)
def script(request):
    return request.param


def command(script, *flags):
    small = ["--frame-size", "42", "--num-steps", "8", "--num-envs", "4", "--network", "shallow"]
    return [sys.executable, script.__file__, *small, *map(str, flags)]


def metrics(run_dir) -> list[dict]:
    return list(csv.DictReader((Path(run_dir) / "metrics.csv").open()))


@pytest.mark.parametrize("many_visits", [False, True])
def test_an_actors_exception_ends_the_run_with_its_own_traceback(script, monkeypatch, tmp_path, many_visits):
    """Within ten seconds, also in the middle of many visits that take nothing from the queue."""
    settings = {"buffer_size": 4, "passes": 200, "num_actors": 2} if many_visits else {}
    if many_visits and script is not impact_atari:
        pytest.skip("only IMPACT visits a batch many times")
    install(monkeypatch, script, RightAction)
    step_env, sgd_step, raised = script.step_env, script.sgd_step, []

    def fragile_step(env, action):
        if len(raised) > 100:
            raised.append(time.time())
            raise RuntimeError("the emulator fell over")
        return step_env(env, action)

    def spy_sgd_step(*given):  # the emulator falls over once the learner is at work
        raised.extend([0.0] * 101)
        return sgd_step(*given)

    monkeypatch.setattr(script, "step_env", fragile_step)
    monkeypatch.setattr(script, "sgd_step", spy_sgd_step)
    with pytest.raises(RuntimeError, match="fell over") as caught:
        script.main(script.Args(**SMALL | settings, total_timesteps=10**6, runs_dir=str(tmp_path)))
    assert time.time() - max(raised) < 10
    assert "fragile_step" in [entry.name for entry in caught.traceback]


@pytest.fixture(scope="module")
def killed_run(script, tmp_path_factory):
    """A real Pong run killed after its first checkpoint: impact_atari by signal 9, the others, whose files are written
    by the same text, by an exception in this process."""
    runs = tmp_path_factory.mktemp("runs")
    if script is not impact_atari:
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            at_call(patch, script, "sgd_step", 30 * SGD_STEPS[script], die)
            script.main(script.Args(**SMALL | {"checkpoint_every": 640, "log_every": 320}, total_timesteps=2400,
                                    runs_dir=str(runs)))  # fmt: skip
        return next(runs.iterdir())
    flags = command(script, "--total-timesteps", 2400, "--checkpoint-every", 640, "--log-every", 320)
    process = subprocess.Popen([*flags, "--eval-episodes", "0", "--runs-dir", str(runs)], stdout=subprocess.DEVNULL)
    deadline = time.time() + 300
    while not list(runs.glob("*/checkpoint.msgpack")):
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.05)
    time.sleep(0.2)
    process.send_signal(signal.SIGKILL)
    process.wait()
    return next(runs.iterdir())


def test_a_killed_run_resumes_and_ends_at_the_planned_step(script, killed_run, tmp_path):
    run_dir = shutil.copytree(killed_run, tmp_path / killed_run.name)
    with (run_dir / "metrics.csv").open("a") as file:
        file.write("99999,1.0,losses/value_loss,0.5\n8000,2.0,losses/val")  # rows past the checkpoint, a torn last line
    before = flax.serialization.msgpack_restore((run_dir / "checkpoint.msgpack").read_bytes()[4:])
    result = script.main(script.Args(resume=str(run_dir)))
    assert result["global_step"] == 2400
    steps = [int(row["global_step"]) for row in metrics(run_dir)]
    assert steps == sorted(steps) and steps[-1] == 2400 and steps[0] <= 640
    walls = [float(row["wall_seconds"]) for row in metrics(run_dir)]
    assert walls == sorted(walls)
    after = flax.serialization.msgpack_restore((run_dir / "checkpoint.msgpack").read_bytes()[4:])
    assert before["progress"]["global_step"] < 2400 and after["progress"]["global_step"] == 2400
    assert after["state"]["step"] == SGD_STEPS[script] * 75  # the schedule went on where it stood
    rates = [float(row["value"]) for row in metrics(run_dir) if row["metric"] == "charts/learning_rate"]
    assert rates == sorted(rates, reverse=True) and abs(rates[-1]) < 1e-9


def test_resume_refuses_missing_damaged_and_foreign_runs(script, killed_run, tmp_path, capsys):
    def refused(run_dir, **flags):
        with pytest.raises(SystemExit) as caught:
            script.main(script.Args(resume=str(run_dir), **flags))
        error = capsys.readouterr().err
        assert caught.value.code == 2 and error.startswith("error: --") and error.count("\n") == 1, error
        return error

    assert "cannot read" in refused(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "cannot read" in refused(tmp_path / "empty")
    whole = (killed_run / "checkpoint.msgpack").read_bytes()
    for name, data in {
        "cut": whole[: len(whole) // 2],
        "none": b"",
        "flipped": whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
        "text": b"hello, this is no checkpoint",
    }.items():
        run_dir = shutil.copytree(killed_run, tmp_path / name)
        (run_dir / "checkpoint.msgpack").write_bytes(data)
        assert "damaged" in refused(run_dir)
    run_dir = shutil.copytree(killed_run, tmp_path / "foreign")
    name = script.__name__.encode()
    content = (run_dir / "checkpoint.msgpack").read_bytes()[4:].replace(name, b"x" * len(name))
    (run_dir / "checkpoint.msgpack").write_bytes(zlib.crc32(content).to_bytes(4, "big") + content)
    assert "xxx.py" in refused(run_dir)
    assert "--learning-rate" in refused(killed_run, learning_rate=0.5)  # another setting is refused, not ignored
    for name, text in {"torn": '{"seed": ', "empty": "{}", "foreign_flag": '{"learner_devices": [0], "x": 1}'}.items():
        run_dir = shutil.copytree(killed_run, tmp_path / f"args_{name}")
        (run_dir / "args.json").write_text(text)
        assert "cannot read" in refused(run_dir)


def test_a_resumed_run_has_the_whole_state(script, killed_run, tmp_path):
    """Resuming and interrupting at once changes nothing: parameters, target, Adam's moments, counters, KL weight."""
    run_dir = shutil.copytree(killed_run, tmp_path / "copy")
    checkpoint = script.Run(script.Args(resume=str(run_dir))).checkpoint
    seen = {}

    def capture(state, *_):
        seen["state"] = flax.serialization.to_state_dict(jax.device_get(state))
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        first = {impact_atari: "evaluate_batch", impala_atari: "sgd_step", ppo_atari: "with_advantages"}[script]
        patch.setattr(script, first, capture)
        with pytest.raises(KeyboardInterrupt):
            script.main(script.Args(resume=str(run_dir)))
    assert checkpoint["state"]["step"] > 0
    if script is impact_atari:
        moved = checkpoint["state"]["params"]["params"]["Dense_0"]["kernel"]
        target = checkpoint["state"]["target_params"]["params"]["Dense_0"]["kernel"]
        np.testing.assert_array_equal(moved, target)  # saved at the end of a generation
    jax.tree.map(np.testing.assert_array_equal, seen["state"], checkpoint["state"])


def test_ctrl_c_saves_a_checkpoint_and_says_how_to_go_on(script, monkeypatch, tmp_path, capsys):
    install(monkeypatch, script, RightAction)
    at_call(monkeypatch, script, "sgd_step", 5 * SGD_STEPS[script], lambda: signal.raise_signal(signal.SIGINT))
    result = script.main(script.Args(**SMALL, total_timesteps=10**6, runs_dir=str(tmp_path)))
    *lines, last = capsys.readouterr().out.strip().splitlines()
    assert "nan" not in lines[3] and "return (20 games)        -   SPS" in lines[3]  # no 20 games yet
    assert last == f"interrupted at step {result['global_step']}; continue with --resume {result['run_dir']}"
    checkpoint = script.Run(script.Args(resume=str(result["run_dir"]))).checkpoint
    assert checkpoint["progress"]["global_step"] == result["global_step"] == 5 * 32
    assert checkpoint["state"]["step"] == 5 * SGD_STEPS[script]
    assert not (result["run_dir"] / "model.msgpack").exists()


def test_ctrl_c_ends_a_process_in_order(tmp_path, script=impact_atari):
    flags = command(script, "--total-timesteps", 10**6, "--log-every", 320, "--runs-dir", str(tmp_path))
    process = subprocess.Popen(flags, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.time() + 300
    while not (found := list(tmp_path.glob("*/metrics.csv"))) or len(found[0].read_text()) < 200:
        assert process.poll() is None and time.time() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 0 and "Traceback" not in err
    last = out.strip().splitlines()[-1]
    assert last.startswith("interrupted at step") and "--resume" in last
    checkpoint = script.Run(script.Args(resume=last.split("--resume ")[1])).checkpoint
    assert f"step {checkpoint['progress']['global_step']};" in last


def test_nan_stops_the_run_and_keeps_the_last_good_checkpoint(script, monkeypatch, tmp_path, capsys):
    install(monkeypatch, script, MatchTheBit)
    calls, step_env = [], script.step_env

    def poisoned(env, action):
        obs, reward, *rest = step_env(env, action)
        calls.append(1)
        return obs, np.where(len(calls) > 100, np.nan, reward).astype(np.float32), *rest

    monkeypatch.setattr(script, "step_env", poisoned)
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(**SMALL, total_timesteps=10**5, runs_dir=str(tmp_path)))
    run_dir = next(tmp_path.iterdir())
    error = capsys.readouterr().err
    assert caught.value.code == 1 and "not finite at step" in error and str(run_dir) in error and "losses/" in error
    checkpoint = script.Run(script.Args(resume=str(run_dir))).checkpoint
    assert all(np.isfinite(x).all() for x in flax.traverse_util.flatten_dict(checkpoint["state"]["params"]).values())
    assert not (run_dir / "model.msgpack").exists()


@pytest.mark.parametrize(
    "flags, named",
    [
        ("--env-id Nope-v5", "--env-id"),
        ("--env-id HalfCheetah-v4", "--env-id"),
        ("--env-id CartPole-v1", "--env-id"),
        ("--num-envs 0", "--num-envs"),
        ("--num-steps -4", "--num-steps"),
        ("--learning-rate nan", "--learning-rate"),
        ("--learning-rate inf", "--learning-rate"),
        ("--max-episode-steps 10000000000", "--max-episode-steps"),
        ("--capture-video --eval-episodes 0", "--capture-video"),
        ("--gamma 1.5", "--gamma"),
        ("--num-steps 50 --num-envs 50 --num-minibatches 3", "--num-minibatches"),
        ("--num-envs 3 --learner-devices 0 1", "--num-envs"),
        ("--learner-devices 0 0", "--learner-devices"),
        ("--learner-devices 5 --num-envs 4", "--learner-devices"),
        ("--actor-device 7", "--actor-device"),
        ("--total-timesteps 10", "--total-timesteps"),
        ("--runs-dir /proc/nowhere", "--runs-dir"),
        ("--resume nowhere", "--resume"),
    ],
)
def test_bad_flags_get_one_line(script, flags, named, capsys):
    if script is ppo_atari and named == "--actor-device":
        pytest.skip("PPO acts on the first device of the learner")
    with pytest.raises(SystemExit) as caught:
        script.main(tyro.cli(script.Args, args=flags.split()))
    error = capsys.readouterr().err
    assert caught.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1 and named in error, error


def test_track_without_wandb_is_refused(script, monkeypatch, capsys):
    monkeypatch.setattr(script.metadata, "distributions", lambda name: [])
    with pytest.raises(SystemExit) as caught:
        script.main(script.Args(track=True))
    assert caught.value.code == 2 and "--track" in capsys.readouterr().err


def test_runs_by_turns_are_bit_identical(script, tmp_path):
    """Real Pong, both runs in one process: metrics.csv is equal but for seconds and speeds."""
    by_turns = {} if script is ppo_atari else dict(num_actors=2, concurrency=False, queue_size=1)
    args = script.Args(**SMALL | by_turns | {"log_every": 64}, num_minibatches=2, seed=3, total_timesteps=320,
                       runs_dir=str(tmp_path))  # fmt: skip
    kept = []
    for _ in range(2):
        rows = metrics(script.main(args)["run_dir"])
        kept.append([(row["global_step"], row["metric"], row["value"]) for row in rows
                     if not row["metric"].startswith("time/") and row["metric"] != "charts/SPS"])  # fmt: skip
    assert kept[0] == kept[1] and len(kept[0]) > 40


def test_run_folder_holds_what_design_promises(script, monkeypatch, tmp_path):
    """And Weights & Biases gets the same, by the same text in all scripts: tried with one."""
    install(monkeypatch, script, RightAction)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    args = script.Args(**SMALL | {"eval_episodes": 4}, total_timesteps=640, runs_dir=str(tmp_path),
                       track=script is impact_atari)  # fmt: skip
    run_dir = script.main(args)["run_dir"]
    names = {path.name.split(".")[0] if "tfevents" in path.name else path.name for path in run_dir.iterdir()}
    assert names >= {"args.json", "versions.json", f"{script.__name__}.py", "metrics.csv", "checkpoint.msgpack",
                     "model.msgpack", "events"}  # fmt: skip
    assert run_dir.name.startswith(f"Pong-v5__{script.__name__}__1__")
    assert json.loads((run_dir / "args.json").read_text())["seed"] == 1
    assert {"python", "jax", "device", "git_commit"} <= set(json.loads((run_dir / "versions.json").read_text()))
    rows = metrics(run_dir)
    wanted = {f"charts/{x}" for x in "episodic_return episodic_length SPS learning_rate".split()}
    wanted |= {f"losses/{x}" for x in "policy_loss value_loss entropy approx_kl clipfrac grad_norm".split()}
    wanted |= {"losses/explained_variance", "eval/episodic_return"}
    assert wanted <= {row["metric"] for row in rows}
    assert list(rows[0]) == ["global_step", "wall_seconds", "metric", "value"]
    model = flax.serialization.msgpack_restore((run_dir / "model.msgpack").read_bytes())
    assert {"format", "args", "params"} <= set(model)
    assert script is not impact_atari or list((tmp_path / "wandb").glob("offline-run-*"))


def test_evaluation_writes_a_gif_of_one_whole_game(tmp_path, script=impact_atari):  # the same in all scripts
    from PIL import Image

    env = script.make_env(script.Args(frame_size=42, max_episode_steps=60), 2, (0,), render=True)
    returns = script.play(2, env, script.step_env, lambda obs, i: np.full(2, i % 6), film=tmp_path)
    assert returns.shape == (2,) and (returns <= 0).all()
    with Image.open(tmp_path / "eval.gif") as gif:
        assert gif.n_frames > 20 and gif.size == (160, 210)
    assert os.path.getsize(tmp_path / "eval.gif") > 1000
