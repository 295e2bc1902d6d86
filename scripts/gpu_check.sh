#!/usr/bin/env bash
# Runs what needs a GPU, on one, in a few minutes: what wrapping a model in FSDP costs there (benchmarks/fsdp_gpu.py), and
# the Transformer Engine tests with the main_grad contract table against the compiled Transformer Engine. Says what it
# skipped where there is no GPU or no compiled Transformer Engine. Arguments go to pytest (--full: the whole table).
#
#   PYTHON   the interpreter (default: the repository's virtual environment, else python3)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi

has_gpu() { "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null; }
has_compiled_te() { "$PYTHON" -c 'import transformer_engine.pytorch, transformer_engine_torch' 2>/dev/null; }

if ! has_gpu; then
    echo "gpu_check: no CUDA device: SKIPPED the benchmark, the Transformer Engine tests and the contract table on a GPU"
    exit 0
fi
"$PYTHON" -c 'import torch; print("gpu_check:", torch.cuda.device_count(), "x", torch.cuda.get_device_name(0))'
"$PYTHON" -m benchmarks.fsdp_gpu
if ! has_compiled_te; then
    echo "gpu_check: no compiled Transformer Engine: SKIPPED its tests and the contract table on a GPU"
    exit 0
fi
"$PYTHON" - <<'PROBE'
from megatron.models.backends.transformer_engine import probe

print("gpu_check:", probe("cuda"))
PROBE
"$PYTHON" -m pytest -q tests/unit/te "$@"
