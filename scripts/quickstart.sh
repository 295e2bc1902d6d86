#!/usr/bin/env bash
# From a fresh clone to a pretrained GPT: makes the environment, tokenises the corpus of this repository,
# pretrains with ZeRO-3 FSDP on two local ranks, stops and resumes from the checkpoint, evaluates on held-out
# text, draws the loss curve and lets the model write. A few minutes on two cores.
#
#   scripts/quickstart.sh [FOLDER]      everything goes to FOLDER (default: runs/quickstart)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
case "${1:-}" in -*) echo "quickstart.sh takes a folder and no flags, not $1: see --help" >&2; exit 2 ;; esac
folder="${1:-$REPOSITORY_ROOT/runs/quickstart}"
began=$SECONDS

heading() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || heading() { printf '\n%s\n' "$*"; }

heading "1/5  Environment"
ensure_environment run
if [ -e "$folder" ] && [ ! -e "$folder/.quickstart" ]; then
    echo "$folder exists and is not of an earlier quickstart: give another folder" >&2
    exit 2
fi
rm -rf "$folder"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
touch "$folder/.quickstart"
cd "$REPOSITORY_ROOT"
gpus="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count())')"
cores="$("$PYTHON" -c 'import os; print(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())')"
ranks=2
[ "$gpus" -eq 1 ] && ranks=1
export OMP_NUM_THREADS=$((cores / ranks > 0 ? cores / ranks : 1))
"$PYTHON" -c 'import platform, torch; print(f"Python {platform.python_version()}, PyTorch {torch.__version__}")'
if [ "$gpus" -gt 0 ]; then
    echo "$ranks rank(s) on GPU with NCCL"
else
    echo "$ranks ranks on CPU with gloo, $OMP_NUM_THREADS thread(s) each"
fi

heading "2/5  Tokenise data/shakespeare.jsonl.gz"
tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model data/shakespeare_spm_2k.model)
"$PYTHON" -m megatron.tools.preprocess_data --input data/shakespeare.jsonl.gz "${tokenizer[@]}" \
    --append-eod --workers "$cores" --output-prefix "$folder/text" --log-interval 1000000
data="$folder/text_text_document"

train_iters=300
first_iters=200
model=(
    --num-layers 4 --hidden-size 192 --num-attention-heads 6 --group-query-attention --num-query-groups 2
    --seq-length 256 --max-position-embeddings 256 --position-embedding-type rope
    --normalization RMSNorm --swiglu --ffn-hidden-size 512 --disable-bias-linear
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --train-iters "$train_iters" --micro-batch-size 4 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 30
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --data-path "$data" --split 90,10,0 --data-cache-path "$folder/cache" --num-workers 0
    --eval-interval 50 --eval-iters 20
    --save "$folder/checkpoints" --save-interval 100 --load "$folder/checkpoints"
    --log-interval 20 --log-throughput
    --metrics-file "$folder/metrics.jsonl" --tensorboard-dir "$folder/tensorboard"
)
pretrain() {
    "$PYTHON" -m torch.distributed.run --nproc-per-node "$ranks" --rdzv-backend c10d \
        --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 \
        pretrain_gpt.py "${model[@]}" "${tokenizer[@]}" "${training[@]}" "$@"
}

heading "3/5  Pretrain: $first_iters of $train_iters iterations, then stop as if the time were up"
pretrain --exit-interval "$first_iters"

heading "4/5  Resume from the checkpoint and finish"
pretrain

heading "5/5  Result"
"$PYTHON" -m megatron.tools.plot_metrics "$folder/metrics.jsonl" --output "$folder/loss.png" \
    --unigram-entropy-of "$data" --require-below 1
echo
echo "The model writes:"
"$PYTHON" -m megatron.tools.generate_text --load "$folder/checkpoints" --prompt "ROMEO:" --num-tokens 150 |
    tee "$folder/sample.txt" | sed 's/^/    /'
echo
echo "Done in $((SECONDS - began)) s. Everything lies in $folder:"
echo "    loss.png        loss curve"
echo "    sample.txt      the text above; more: $PYTHON -m megatron.tools.generate_text --load $folder/checkpoints"
echo "    checkpoints/    iter_NNNNNNN for every save; the marker file names the latest"
echo "    metrics.jsonl   one JSON object per log line; tensorboard/ has the same"
