#!/usr/bin/env bash
# Finds the first commit at which a functional case fails, in a working tree of its own.
#
#   scripts/bisect_golden.sh gpt/zero1 --good core_v0.1.0 [--bad HEAD] [--values-of COMMIT]
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/release/run.sh" bisect "$@"
