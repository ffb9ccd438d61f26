#!/usr/bin/env bash
# IMPACT on MuJoCo at the scale of two CPU cores, on an otherwise idle machine: three tasks, one million steps, three
# seeds, asynchronous and synchronous (which is PPO) by turns; three million steps; the ablations.
#     bash benchmark/small_mujoco.sh --dry-run          what would run, and its hours
#     bash benchmark/small_mujoco.sh                    run it; the same command goes on after an interruption
#     bash benchmark/small_mujoco.sh --only Hopper      the lines that contain a text alone
set -euo pipefail
cd "$(dirname "$0")/.."
TAB=$'\t'
ZERO_LAG="--no-concurrency --queue-size 0 --kl-coef 0"
{
    for tasks in "HalfCheetah-v4 Hopper-v4" Humanoid-v4; do
        for seed in 1 2 3; do
            for task in $tasks; do
                echo "default${TAB}impact_mujoco.py --env-id $task --seed $seed"
                echo "zero-lag${TAB}impact_mujoco.py --env-id $task --seed $seed $ZERO_LAG"
            done
        done
    done
    for seed in 1 2; do
        ablation="impact_mujoco.py --env-id HalfCheetah-v4 --seed $seed --total-timesteps 300000"
        echo "ablation-base${TAB}$ablation"
        for ratio in impact target worker; do # 16 rollouts, or 320 SGD steps, of lag
            echo "ablation-ratio-$ratio${TAB}$ablation --ratio $ratio --no-concurrency --queue-size 16"
        done
        echo "ablation-kl_coef-0${TAB}$ablation --kl-coef 0"
        echo "ablation-lag-0${TAB}$ablation --no-concurrency --queue-size 0"
        for bound in 1 4; do echo "ablation-c_bar-$bound${TAB}$ablation --c-bar $bound"; done
        for n in 1 2 8 16; do echo "ablation-slots-$n${TAB}$ablation --buffer-size $n"; done
        for k in 5 10 40; do echo "ablation-passes-$k${TAB}$ablation --passes $k"; done
        for period in 2 4; do echo "ablation-period-$period${TAB}$ablation --target-period $period"; done
    done
    echo "long${TAB}impact_mujoco.py --env-id HalfCheetah-v4 --total-timesteps 3000000"
    echo "long-zero-lag${TAB}impact_mujoco.py --env-id HalfCheetah-v4 --total-timesteps 3000000 $ZERO_LAG"
} | python benchmark/protocol.py --runs-dir runs/small "$@"
