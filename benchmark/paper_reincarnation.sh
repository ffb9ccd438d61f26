#!/usr/bin/env bash
# Reincarnating RL at the paper's scale: ten games, three seeds. A DQN of 400 million frames teaches a DQN (10 million
# frames) and a Rainbow (50 million); beside them the same students from scratch, kickstarted, and offline only.
#     bash benchmark/paper_reincarnation.sh --dry-run     what would run, and its hours
#     bash benchmark/paper_reincarnation.sh               run it; the same command goes on after an interruption
# The teachers come first; TEACHERS names the folder of the runs that teach (default: those made by the first lines).
set -euo pipefail
cd "$(dirname "$0")/.."
TAB=$'\t'
GAMES="Asterix Breakout SpaceInvaders Seaquest Qbert BeamRider Enduro MsPacman Bowling Riverraid"
TEACHERS=${TEACHERS:-runs/paper/teacher}
{
    for game in $GAMES; do
        echo "teacher${TAB}qdagger_dqn_atari.py --env-id $game-v5 --teacher none --total-timesteps 100000000" \
            "--save-replay"
    done
    for seed in 1 2 3; do
        for game in $GAMES; do
            teacher=$(ls -d "$TEACHERS/$game-v5__"*/ 2>/dev/null | tail -n 1 || true)
            taught="--env-id $game-v5 --seed $seed --teacher ${teacher:-$TEACHERS/$game-v5}"
            scratch="--env-id $game-v5 --seed $seed --teacher none"
            echo "paper${TAB}qdagger_dqn_atari.py $taught"
            echo "paper-kickstart${TAB}qdagger_dqn_atari.py $taught --offline-steps 0"
            echo "paper-offline${TAB}qdagger_dqn_atari.py $taught --total-timesteps 0"
            echo "paper-scratch${TAB}qdagger_dqn_atari.py $scratch --total-timesteps 2500000"
            echo "paper${TAB}qdagger_rainbow_atari.py $taught --total-timesteps 12500000"
            echo "paper-scratch${TAB}qdagger_rainbow_atari.py $scratch --total-timesteps 25000000"
        done
    done
} | python benchmark/protocol.py "$@"
