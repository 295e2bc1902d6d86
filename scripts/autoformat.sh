#!/usr/bin/env bash
# Formats the code and mends what the linter can mend; prints what is left to do by hand.
#
#   scripts/autoformat.sh [--check] [PATH...]
#
#   --check   change nothing; status 1 if something would change (as .ci/run does)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

check=no
if [ "${1:-}" = --check ]; then
    check=yes
    shift
fi
ensure_environment test
cd "$REPOSITORY_ROOT"
paths=("${@:-.}")
if [ "$check" = yes ]; then
    "$PYTHON" -m ruff format --check "${paths[@]}"
    "$PYTHON" -m ruff check "${paths[@]}"
else
    "$PYTHON" -m ruff check --fix --quiet "${paths[@]}" || true
    "$PYTHON" -m ruff format "${paths[@]}"
    "$PYTHON" -m ruff check "${paths[@]}"
fi
