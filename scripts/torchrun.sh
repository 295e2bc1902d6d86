#!/usr/bin/env bash
# Starts a script on ranks of this machine: makes the environment if needed, meets on a free port of loopback, one
# thread a rank unless OMP_NUM_THREADS says otherwise. CPU or GPU.
#
#   scripts/torchrun.sh RANKS SCRIPT [FLAGS]
#   scripts/torchrun.sh 2 pretrain_gpt.py --num-layers 4 ...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "$#" -lt 2 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    show_usage
    exit $(($# < 2 ? 2 : 0))
fi
ranks="$1"
shift
ensure_environment run
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m torch.distributed.run --nproc-per-node "$ranks" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 "$@"
