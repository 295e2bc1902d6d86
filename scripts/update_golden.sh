#!/usr/bin/env bash
# Renews the golden values of functional cases and shows what moved and how much; records platform, CPU capability,
# torch version, threads and commit with them. Commit the change with the reason for which numbers moved.
#
#   scripts/update_golden.sh [CASE...] [--diff] [--launch] [--once] [--force] [--platform cpu|gpu]
#
#   CASE         folder below tests/functional/test_cases (default: all of them)
#   --diff       show only
#   --launch     start every run as a user does (slower; the numbers are the same)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
ensure_environment test
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m tests.functional.update_golden "$@"
