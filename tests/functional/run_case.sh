#!/usr/bin/env bash
# Runs one functional case as a user would, by scripts/torchrun.sh, and compares its numbers with its golden values, with
# its own one-rank run and, for resumes, with its own uninterrupted run. Prints what differs; status 1 if anything does.
#
#   tests/functional/run_case.sh CASE [--output FOLDER] [--platform cpu|gpu] [--run-only]
#
#   CASE         folder below tests/functional/test_cases, e.g. gpt/dropout-ckpt-resume
#   --output     logs, metrics and checkpoints (default: runs/functional/CASE, made anew)
#   --run-only   do not compare
#
# Status 125 where no Python environment can be made at this commit: git bisect skips it.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
source "$root/scripts/env.sh"

if [ "$#" -lt 1 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    show_usage
    exit $(($# < 1 ? 2 : 0))
fi
case_name="$1" output="" platform=cpu compare=yes
shift
while [ "$#" -gt 0 ]; do
    case "$1" in
        --output) output="$2" && shift 2 ;;
        --platform) platform="$2" && shift 2 ;;
        --run-only) compare=no && shift ;;
        *) echo "unknown argument $1; see --help" >&2 && exit 2 ;;
    esac
done
ensure_environment test || exit 125
cd "$root"
output="${output:-runs/functional/$case_name}"
rm -rf "$output"
mkdir -p "$output"
statements="$("$PYTHON" -m tests.functional.cases "$case_name" --output "$output" --platform "$platform")"
eval "$statements"

run() { # run RANKS LOG SCRIPT FLAGS...
    local ranks="$1" log="$2" status=0
    shift 2
    [ -n "${FUNCTIONAL_TEST_HOOKS:-}" ] && set -- tests/functional/hooked.py "$@"
    scripts/torchrun.sh "$ranks" "$@" >"$log" 2>&1 || status=$?
    if [ "$status" -ne 0 ]; then
        tail -n 40 "$log" >&2
        echo "$case_name: status $status; the whole log: $log" >&2
        exit "$status"
    fi
}
run "$ranks_1" "$output/log_1.txt" "$script_1" "${words_1[@]}"
if [ "$number_of_launches" -gt 1 ]; then
    run "$ranks_2" "$output/log_2.txt" "$script_2" "${words_2[@]}"
fi
[ "$compare" = no ] && exit 0
unset FUNCTIONAL_TEST_HOOKS # what is compared with is the run without faults
exec "$PYTHON" -m tests.functional.check "$case_name" --output "$output" --platform "$platform"
