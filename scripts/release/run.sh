#!/usr/bin/env bash
# Runs `python -m scripts.release COMMAND` for scripts/cherry_pick.sh and its sisters, from a copy: the tools stay those of
# this checkout also while an old branch is checked out that has none.
set -euo pipefail
tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
mkdir "$tools/scripts"
cp -r "$(dirname "${BASH_SOURCE[0]}")" "$tools/scripts/release"
PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}" python3 "$tools/scripts/release/__main__.py" "$@"
