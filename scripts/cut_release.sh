#!/usr/bin/env bash
# Cuts a release: branch core_rX.Y with its version, changelog and tag; main goes on with the next version. X.Y.Z is a
# patch release of a branch that exists. Pushes nothing.
#
#   scripts/cut_release.sh 0.1 [--dry-run]
#   scripts/cut_release.sh 0.1.1
set -euo pipefail
# The tools come from this checkout also while an old branch is checked out that has none.
tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
mkdir "$tools/scripts"
cp -r "$(dirname "${BASH_SOURCE[0]}")/release" "$tools/scripts/release"
PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}" python3 "$tools/scripts/release/__main__.py" cut "$@"
