#!/usr/bin/env bash
# Reincarnating RL at the scale of two CPU cores: Pong with the bundled teacher, both students, tabula rasa with as many
# environment steps, and the ablations over the teacher's data and the two phases.
#     bash benchmark/small_reincarnation.sh --dry-run     what would run, and its hours
#     bash benchmark/small_reincarnation.sh               run it; the same command goes on after an interruption
set -euo pipefail
cd "$(dirname "$0")/.."
TAB=$'\t'
PONG="--env-id Pong-v5 --network shallow --iteration-steps 10000 --eval-steps 1 --log-every 2000 --checkpoint-every 10000"
PHASES="--collect-steps 100000 --offline-steps 30000 --total-timesteps 50000 --learning-starts 2000"
PHASES+=" --replay-capacity 100000"
{
    for seed in 1 2; do
        for student in qdagger_dqn_atari qdagger_rainbow_atari; do
            echo "small${TAB}$student.py $PONG --seed $seed $PHASES"
        done
        # As many steps as the teacher's data and the student's own together; epsilon falls over a tenth of them.
        echo "small-scratch${TAB}qdagger_dqn_atari.py $PONG --seed $seed --teacher none --total-timesteps 150000" \
            "--replay-capacity 150000 --learning-starts 2000 --epsilon-decay-steps 15000"
    done
    dqn="qdagger_dqn_atari.py $PONG $PHASES"
    for steps in 25000 50000; do echo "ablation-data-$steps${TAB}$dqn --collect-steps $steps"; done
    # As many updates, all of them offline; and none of them offline.
    echo "ablation-phases-offline${TAB}$dqn --offline-steps 42500 --total-timesteps 0"
    echo "ablation-phases-online${TAB}$dqn --offline-steps 0"
} | python benchmark/protocol.py --runs-dir runs/small "$@"
