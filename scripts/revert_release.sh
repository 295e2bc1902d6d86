#!/usr/bin/env bash
# Takes commits out of a release branch; the functional case that caused it is kept with the revert, and
# scripts/cherry_pick.sh runs it first when the change lands again.
#
#   scripts/revert_release.sh COMMIT... --onto core_r0.1 --reason "..." [--case gpt/zero1] [--dry-run] [--merge]
#   scripts/revert_release.sh --continue | --abort
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/release/run.sh" revert "$@"
