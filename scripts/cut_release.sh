#!/usr/bin/env bash
# Cuts a release: branch core_rX.Y with its version, changelog and tag; main goes on with the next version. X.Y.Z is a
# patch release of a branch that exists. Pushes nothing.
#
#   scripts/cut_release.sh 0.1 [--dry-run]
#   scripts/cut_release.sh 0.1.1
set -euo pipefail
exec "$(dirname "${BASH_SOURCE[0]}")/release/run.sh" cut "$@"
