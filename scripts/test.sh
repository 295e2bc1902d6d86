#!/usr/bin/env bash
# Runs the tests; makes the environment first if needed. Arguments go to pytest:
#   scripts/test.sh                      everything but the cells marked `full`
#   scripts/test.sh --full               everything
#   scripts/test.sh tests/unit/fsdp -x   as with pytest
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"
ensure_environment test
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest "$@"
