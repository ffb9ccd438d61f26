#!/usr/bin/env bash
# Twelve minutes of one machine, best one GPU and 16 cores: speeds of all scripts, the learner against the device's
# peak, Pong to +18, queue lengths and actor threads. Writes benchmark/results/gpu_check__{device}.csv.
#     bash benchmark/gpu_check.sh             the whole check
#     bash benchmark/gpu_check.sh --quick     smaller and shorter: under ten minutes on two CPU cores
set -euo pipefail
cd "$(dirname "$0")/.."
exec python benchmark/gpu_check.py "$@"
