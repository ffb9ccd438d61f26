"""Claim 7 of IMPACT in miniature: the ratio's three forms under one forced lag, `python benchmark/lag_ablation.py`.

Every rollout is `LAG` rollouts old when the learner sees it (--no-concurrency, so the lag is exact and a run is
reproducible). Two of the tests' micro-environments, two seeds each, a constant step size. Prints the mean return over
training, the mean of the last third, the evaluation, and the KL from worker to live policy; writes
benchmark/results/lag_ablation.csv.
"""

import contextlib
import csv
import io
import sys
import tempfile
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "tests")]
import micro_envs

import impact_atari as script

LAG = 31
SETTINGS = dict(
    frame_size=42, num_envs=8, num_steps=16, num_minibatches=2, passes=8, gamma=0.9, learning_rate=2e-3,
    anneal_lr=False, max_grad_norm=1.0, total_timesteps=128 * 96, log_every=128 * 4, eval_episodes=100,
    concurrency=False, queue_size=LAG,
)  # fmt: skip


def one_run(kind, ratio: str, seed: int) -> dict[str, float]:
    script.make_env = lambda args, num_envs, entropy, render=False: kind(
        num_envs, args.frame_size, int(np.random.SeedSequence(entropy).generate_state(1)[0])
    )
    with tempfile.TemporaryDirectory() as runs_dir, contextlib.redirect_stdout(io.StringIO()):
        result = script.main(script.Args(**SETTINGS, ratio=ratio, seed=seed, runs_dir=runs_dir))
        rows = list(csv.DictReader((result["run_dir"] / "metrics.csv").open()))
    curve = {name: [float(r["value"]) for r in rows if r["metric"] == name] for name in {r["metric"] for r in rows}}
    returns = curve["charts/episodic_return"]
    return {
        "return_mean": np.mean(returns),
        "return_last_third": np.mean(returns[-len(returns) // 3 :]),
        "return_evaluation": result["eval_return"],
        "kl_worker_live": np.mean(curve["losses/approx_kl"]),
    }


def main():
    with (HERE / "results" / "lag_ablation.csv").open("w") as file:
        file.write("environment,ratio,seed,return_mean,return_last_third,return_evaluation,kl_worker_live\n")
        for kind in (micro_envs.MatchTheBit, micro_envs.Catch):
            for ratio in ("impact", "target", "worker"):
                runs = [one_run(kind, ratio, seed) for seed in (1, 2)]
                for seed, run in enumerate(runs, 1):
                    values = ",".join(f"{x:.4g}" for x in run.values())
                    file.write(f"{kind.__name__},{ratio},{seed},{values}\n")
                summary = {k: (np.mean([r[k] for r in runs]), np.std([r[k] for r in runs])) for k in runs[0]}
                columns = "   ".join(f"{k} {mean:7.3f} +- {std:.3f}" for k, (mean, std) in summary.items())
                print(f"{kind.__name__:12s} {ratio:7s} {columns}", flush=True)


if __name__ == "__main__":
    (HERE / "results").mkdir(exist_ok=True)
    main()
