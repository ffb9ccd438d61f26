#!/usr/bin/env bash
# IMPACT's discrete half at the paper's scale: six games, three scripts, three seeds, 10 million steps each.
#     bash benchmark/paper_atari.sh --dry-run     what would run, and its hours
#     bash benchmark/paper_atari.sh               run it; the same command goes on after an interruption
set -euo pipefail
cd "$(dirname "$0")/.."
TAB=$'\t'
{
    for seed in 1 2 3; do
        for game in Breakout Pong SpaceInvaders BeamRider Qbert Seaquest; do
            shared="--env-id $game-v5 --seed $seed --total-timesteps 10000000 --network shallow --num-envs 64"
            echo "paper${TAB}impact_atari.py $shared --num-actors 4 --queue-size 4"
            echo "paper${TAB}impala_atari.py $shared --num-actors 4 --queue-size 4"
            echo "paper${TAB}ppo_atari.py $shared"
        done
    done
    # The ablations of section 4.3, on one game: the ratio, the period of the target, passes K and slots N.
    for seed in 1 2 3; do
        run="impact_atari.py --env-id Breakout-v5 --seed $seed --num-envs 64 --num-actors 4 --queue-size 4"
        for ratio in target worker; do echo "ablation-ratio-$ratio${TAB}$run --ratio $ratio"; done
        for period in 2 4 8; do echo "ablation-period-$period${TAB}$run --target-period $period"; done
        for passes in 1 4 8; do echo "ablation-passes-$passes${TAB}$run --passes $passes"; done
        for slots in 2 4 8; do echo "ablation-slots-$slots${TAB}$run --buffer-size $slots"; done
    done
} | python benchmark/protocol.py "$@"
