"""The evidence's own code: what ends a run, what is kept of it, and what the report reads off."""

import csv
import importlib
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tyro

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmark"
sys.path.insert(0, str(BENCHMARK))
import compare
import gpu_check
import keep
import protocol
import report


def fake_run(folder: Path, curve: list[float], script="ppo_atari", env_id="Breakout-v5", seed=1, seconds=10.0) -> Path:
    """A run folder whose 20-game mean is logged every 20,000 steps."""
    folder.mkdir(parents=True)
    (folder / "args.json").write_text(json.dumps({"env_id": env_id, "seed": seed, "runs_dir": "elsewhere"}))
    (folder / "versions.json").write_text(json.dumps({"git_commit": "abc", "cpus": 2, "device": "cpu", "jax": "1"}))
    (folder / f"{script}.py").touch()
    rows = ["global_step,wall_seconds,metric,value"]
    for i, value in enumerate(curve, 1):
        row = f"{20_000 * i},{seconds * i}"
        rows += [f"{row},charts/episodic_return_20,{value}", f"{row},charts/SPS,2000", f"{row},losses/entropy,1.0"]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return folder


def test_one_lucky_game_does_not_end_a_run(tmp_path):
    assert not compare.arrived(fake_run(tmp_path / "a", [10, 33, 33, 33, 33, 12, 31]), 30)
    lasting = fake_run(tmp_path / "b", [10, 33, 12, 30, 31, 40, 35, 30.5])
    assert compare.arrived(lasting, 30)
    with (lasting / "metrics.csv").open("a") as file:
        file.write("180000,90.0,charts/episodic_ret")  # being written just now
    assert compare.arrived(lasting, 30) and not compare.arrived(lasting, 31)


@pytest.mark.parametrize("script", compare.SETTINGS)
@pytest.mark.parametrize("env_id", ["Pong-v5", "Breakout-v5"])
def test_the_compared_settings_are_flags_and_share_what_they_can(script, env_id):
    def read(name):
        flags = compare.flags_of(compare.Compare(env_id=env_id, extra="--no-track"), name, seed=7)
        return tyro.cli(importlib.import_module(name).Args, args=shlex.split(flags))

    own, ppo = read(script), read("ppo_atari")
    assert own.env_id == env_id and own.seed == 7 and own.total_timesteps == 3_000_000
    shared = "network frame_size num_envs num_steps num_minibatches vf_coef ent_coef gamma anneal_lr episodic_life"
    shared += "" if script == "impala_atari" else " learning_rate gae_lambda clip_coef norm_adv max_grad_norm"
    for name in shared.split():
        assert getattr(own, name) == getattr(ppo, name), name


def test_a_run_with_other_flags_is_not_taken_for_this_one(tmp_path):
    folder = tmp_path / "compare" / "ppo_atari" / "Breakout-v5__ppo_atari__1__7"
    fake_run(folder, [1.0])
    (folder / "checkpoint.msgpack").touch()
    with pytest.raises(SystemExit, match="other flags"):
        compare.run(compare.Compare(runs_dir=str(tmp_path)), "ppo_atari", 1)


def test_keep_keeps_every_point_of_the_curve_and_no_path(tmp_path, monkeypatch):
    monkeypatch.setattr(keep, "__file__", str(tmp_path / "benchmark" / "keep.py"))
    curve = [float(i % 50) for i in range(250)]
    keep.main(str(fake_run(tmp_path / "run", curve)), "compare", "python ppo_atari.py", "a note", 30)
    target = tmp_path / "benchmark/results/ppo_atari/Breakout-v5__compare__1.csv"
    rows = list(csv.DictReader(target.open()))
    assert len(rows) <= 500 and list(rows[0]) == ["global_step", "wall_seconds", "metric", "value"]
    assert [float(r["value"]) for r in rows if r["metric"] == "charts/episodic_return_20"] == curve
    facts = json.loads(target.with_suffix(".json").read_text())
    assert facts["threshold"] == 30 and facts["commit"] == "abc" and facts["steps"] == 5_000_000
    assert facts["command"] == "python ppo_atari.py" and "elsewhere" not in json.dumps(facts)


def test_report_reads_off_the_thresholds_and_draws(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(keep, "__file__", str(tmp_path / "keep.py"))
    curves = {
        ("impact_atari", 1): [1, 40, 2, 30, 31, 32, 33, 34],
        ("impact_atari", 2): [1, 2, 3, 4, 30, 31, 32, 33, 34],
        ("impala_atari", 1): [1, 2, 3, 4, 5, 6, 7, 30, 31, 32, 33, 34],
        ("ppo_atari", 1): [1, 2, 3],
    }
    for (script, seed), curve in curves.items():
        folder = tmp_path / f"{script}{seed}"
        keep.main(str(fake_run(folder, curve, script, seed=seed, seconds=60.0)), "compare", "", "", 30)
    keep.main(str(fake_run(tmp_path / "ablation", [1, 2], "impact_atari")), "ablation-ratio-target")
    for variant, seed, curve in ("default", 1, [0, 8, 20]), ("default", 2, [2, 9, 40]), ("zero-lag", 1, [1, 2, 8]):
        run = fake_run(tmp_path / f"{variant}{seed}", curve, "impact_mujoco", "Hopper-v4", seed, seconds=60.0)
        keep.main(str(run), variant)
    capsys.readouterr()
    report.main(tmp_path / "results", tmp_path / "figures")
    out = capsys.readouterr().out
    assert "| Breakout-v5 +30 | `impact_atari` | once | 2 of 2 | 0.07 (0.04 to 0.10) | 3.5 (2.0 to 5.0) |" in out
    assert "| Breakout-v5 +30 | `impact_atari` | lasting | 2 of 2 | 0.09 (0.08 to 0.10) | 4.5 (4.0 to 5.0) |" in out
    assert "| Breakout-v5 +30 | `impala_atari` | lasting | 1 of 1 | 0.16 | 8.0 |" in out
    assert "| Breakout-v5 +30 | `ppo_atari` | lasting | 0 of 1 | - | - |" in out
    assert f"IMPACT / IMPALA: {4.5 / 8:.2f}" in out
    assert "| Hopper-v4 | `impact_mujoco` | default | 2 | 30.0 | 30.0 (20.0 to 40.0) | - | 333 (333 to 333) |" in out
    assert "| Breakout-v5 | `impact_atari` | ablation-ratio-target | 1 | 2.0 | 2.0 | 0.01 | 2000 |" in out
    assert "Hopper-v4: 2 of 2 runs reach 8, the end of the synchronous form, 0.67 (0.67 to 0.67) of its steps" in out
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"compare__Breakout-v5.png", "impact_atari__ablation__Breakout-v5.png",
                     "impact_mujoco__Hopper-v4.png"}  # fmt: skip


def test_report_measures_a_student_by_its_teacher(tmp_path, monkeypatch, capsys):
    """Random play scores 1.7 on Breakout, the teacher 21.7: a student of 11.7 stands halfway between them."""
    monkeypatch.setattr(keep, "__file__", str(tmp_path / "keep.py"))
    runs = [
        ("qdagger_dqn_atari", "small", 21.7, [5.7, 9.7, 11.7, 13.7]),
        ("qdagger_dqn_atari", "small-scratch", None, [1.7, 1.7, 1.7, 1.7]),
        ("qdagger_dqn_atari", "ablation-data-10", 21.7, [2.7, 3.7, 4.7, 5.7]),
        ("qdagger_rainbow_atari", "small", 21.7, [21.7, 21.7, 21.7, 21.7]),
    ]
    for i, (script, variant, teacher, curve) in enumerate(runs):
        run = fake_run(tmp_path / str(i), [1.0], script)
        args = json.loads((run / "args.json").read_text()) | {"collect_steps": 1000, "offline_steps": 200}
        (run / "args.json").write_text(json.dumps(args))
        rows = ["global_step,wall_seconds,metric,value"]
        for step, value in zip((-100, 0, 100, 200) if teacher else (100, 200, 300, 400), curve):
            rows.append(f"{step},{step + 300},eval/episodic_return,{value}")
            rows += [f"{step},{step + 300},charts/teacher_score,{teacher}"] * bool(teacher)
        (run / "metrics.csv").write_text("\n".join(rows) + "\n")
        keep.main(str(run), variant)
    capsys.readouterr()
    report.main(tmp_path / "results", tmp_path / "figures")
    out = capsys.readouterr().out
    assert "| Breakout-v5 | `qdagger_dqn_atari` | small | 1 | 1,000 + 200 | 21.7 | 9.7 | 11.7 | 0.50 |" in out
    assert "| Breakout-v5 | `qdagger_dqn_atari` | small-scratch | 1 | 0 + 400 | 21.7 | - | 1.7 | 0.00 |" in out
    assert "| Breakout-v5 | `qdagger_rainbow_atari` | small | 1 | 1,000 + 200 | 21.7 | 21.7 | 21.7 | 1.00 |" in out
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    assert drawn == {"reincarnation__Breakout-v5.png", "qdagger_dqn_atari__ablation__Breakout-v5.png"}


def test_report_redraws_the_committed_figures(tmp_path):
    report.main(BENCHMARK / "results", tmp_path)
    drawn, committed = ({path.name for path in folder.iterdir()} for folder in (tmp_path, BENCHMARK / "figures"))
    assert drawn == committed


@pytest.mark.parametrize(
    "name, least",
    [
        ("paper_atari", 54),
        ("paper_mujoco", 27),
        ("paper_reincarnation", 130),
        ("small_mujoco", 40),
        ("small_reincarnation", 10),
    ],
)
def test_the_papers_protocols_list_what_would_run(name, least):
    """Every line is a command that its script accepts; --dry-run runs none of them."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", str(BENCHMARK / f"{name}.sh"), "--dry-run", "--steps-per-second", "10"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if " python " in line]
    assert len(lines) >= least and all(" h   " in line for line in lines)
    hours = sum(float(line.split(" h ")[0]) for line in lines)
    assert float(done.stdout.split("\n\n")[-1].split()[0]) == pytest.approx(hours, rel=0.02)


def test_a_protocol_skips_goes_on_and_keeps(tmp_path, monkeypatch):
    started, kept = [], []

    def run(command):
        started.append(command[2:])
        for folder in (tmp_path / "paper").glob("*"):
            (folder / "model.msgpack").touch()
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(protocol.subprocess, "run", run)
    monkeypatch.setattr(protocol.keep, "main", lambda *given: kept.append(given[:2]))
    for seed in 1, 2:
        (tmp_path / "paper" / f"Pong-v5__ppo_atari__{seed}__7").mkdir(parents=True)
    (tmp_path / "paper/Pong-v5__ppo_atari__1__7/model.msgpack").touch()
    (tmp_path / "paper/Pong-v5__ppo_atari__2__7/checkpoint.msgpack").touch()
    lines = [f"paper\tppo_atari.py --env-id Pong-v5 --seed {seed}\n" for seed in (1, 2)]
    protocol.main(protocol.Protocol(runs_dir=str(tmp_path)), lines)
    assert started == [["--resume", str(tmp_path / "paper/Pong-v5__ppo_atari__2__7")]]
    assert [Path(folder).name for folder, _ in kept] == [f"Pong-v5__ppo_atari__{seed}__7" for seed in (1, 2)]


def test_gpu_check_reads_speeds_off_a_run(tmp_path, monkeypatch):
    """A run that would go on for ever gets its time, Ctrl-C, and is read off; one that reaches its goal is ended."""
    (tmp_path / "fake.py").write_text(
        "import pathlib, sys, time\n"
        "folder = pathlib.Path(sys.argv[sys.argv.index('--runs-dir') + 1]) / 'run'\n"
        "folder.mkdir()\n"
        "with (folder / 'metrics.csv').open('w') as file:\n"
        "    file.write('global_step,wall_seconds,metric,value\\n')\n"
        "    for i in range(10):\n"
        "        file.write(f'{i},{i / 10},charts/SPS,{100 * i}\\n')\n"
        "print('step 10   return (20 games)    18.50   SPS', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    start = time.time()
    series = gpu_check.run_for(2, "fake.py", "--seed 1")
    assert gpu_check.second_half(series["charts/SPS"]) == 700 and 2 <= time.time() - start < 20
    start = time.time()
    assert gpu_check.run_for(30, "fake.py", "", until=18.0) and time.time() - start < 15
