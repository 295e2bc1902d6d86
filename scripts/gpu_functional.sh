#!/usr/bin/env bash
# Functional cases on GPUs: runs those that fit this machine, with NCCL and the compiled Transformer Engine, and holds them to
# golden_values_gpu.json, their one-rank runs and their resumes. Says what it skipped. Files that are missing are made by
# scripts/update_golden.sh --platform gpu CASE.
#
#   scripts/gpu_functional.sh [CASE...]     default: every case
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
ensure_environment test || exit 1
cd "$REPOSITORY_ROOT"
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
if [ "$gpus" -eq 0 ]; then
    echo "gpu_functional: no CUDA device: SKIPPED all cases"
    exit 0
fi
has_te=yes
"$PYTHON" -c 'import transformer_engine_torch' 2>/dev/null || has_te=no
cases=("$@")
[ "$#" -gt 0 ] || mapfile -t cases < <("$PYTHON" -m tests.functional.cases | sed 's/ \*$//')
failed=() skipped=0
for name in "${cases[@]}"; do
    statements="$("$PYTHON" -m tests.functional.cases "$name" --platform gpu)" || exit 2
    ranks="$(sed -n 's/^ranks_[12]=\([0-9]*\).*/\1/p' <<<"$statements" | sort -n | tail -1)"
    if [ "$ranks" -gt "$gpus" ]; then
        echo "$name: SKIPPED, $ranks ranks on $gpus GPU(s)"
        skipped=$((skipped + 1))
    elif [ "$has_te" = no ] && grep -q transformer_engine <<<"$statements"; then
        echo "$name: SKIPPED, no compiled Transformer Engine"
        skipped=$((skipped + 1))
    else
        tests/functional/run_case.sh "$name" --platform gpu || failed+=("$name")
    fi
done
echo "gpu_functional: ${#cases[@]} cases, $skipped skipped, ${#failed[@]} failed${failed[*]:+: ${failed[*]}}"
[ "${#failed[@]}" -eq 0 ]
