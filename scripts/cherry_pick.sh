#!/usr/bin/env bash
# Picks commits of main onto a release branch (core_rX.Y) or dev, on a branch of their own, and checks them:
# unit tests, and the functional cases that the changed files touch. A conflict or a failing check leaves the release
# branch untouched; --continue goes on, --abort goes back. The report is under runs/release/.
#
#   scripts/cherry_pick.sh COMMIT... --onto core_r0.1 [--dry-run] [--merge]
#   scripts/cherry_pick.sh --continue | --abort
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/release/run.sh" pick "$@"
