#!/usr/bin/env bash
# IMPACT's continuous half: three tasks, three seeds, the default preset at 3 million steps, its synchronous form (PPO),
# and the paper's own scale at 100 million steps.
#     bash benchmark/paper_mujoco.sh --dry-run     what would run, and its hours
#     bash benchmark/paper_mujoco.sh               run it; the same command goes on after an interruption
set -euo pipefail
cd "$(dirname "$0")/.."
TAB=$'\t'
{
    for seed in 1 2 3; do
        for task in HalfCheetah-v4 Hopper-v4 Humanoid-v4; do
            shared="impact_mujoco.py --env-id $task --seed $seed"
            echo "paper-3m${TAB}$shared --total-timesteps 3000000"
            echo "paper-3m-zero-lag${TAB}$shared --total-timesteps 3000000 --no-concurrency --queue-size 0 --kl-coef 0"
            echo "paper-100m${TAB}$shared --total-timesteps 100000000 --buffer-size 16 --num-envs 32 --num-steps 1024" \
                "--num-actors 16 --queue-size 16 --gamma 0.995 --gae-lambda 0.995 --clip-coef 0.4 --no-free-log-std" \
                "--no-norm-adv --no-scale-reward --no-anneal-lr --c-bar 1"
        done
    done
    for seed in 1 2 3; do
        shared="impact_mujoco.py --env-id HalfCheetah-v4 --seed $seed --total-timesteps 3000000"
        for ratio in target worker; do echo "ablation-ratio-$ratio${TAB}$shared --ratio $ratio --num-actors 8"; done
        for slots in 1 4 32; do echo "ablation-slots-$slots${TAB}$shared --buffer-size $slots"; done
        for passes in 5 10 40; do echo "ablation-passes-$passes${TAB}$shared --passes $passes"; done
        for period in 2 4; do echo "ablation-period-$period${TAB}$shared --target-period $period"; done
    done
} | python benchmark/protocol.py "$@"
