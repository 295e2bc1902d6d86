#!/usr/bin/env bash
# Finds the first commit at which a functional case fails, in a working tree of its own.
#
#   scripts/bisect_golden.sh gpt/zero1 --good core_v0.1.0 [--bad HEAD] [--values-of COMMIT]
set -euo pipefail
# The tools come from this checkout also while an old branch is checked out that has none.
tools="$(mktemp -d)"
trap 'rm -rf "$tools"' EXIT
mkdir "$tools/scripts"
cp -r "$(dirname "${BASH_SOURCE[0]}")/release" "$tools/scripts/release"
PYTHONPATH="$tools${PYTHONPATH:+:$PYTHONPATH}" python3 "$tools/scripts/release/__main__.py" bisect "$@"
