#!/usr/bin/env bash
# Pretrain a tiny DeepSeek-V3 (latent attention, experts with bias routing, a further token predicted) on this
# repository's corpus: 4 ranks, expert parallel 2 x context parallel 2, ZeRO-3 FSDP. CPU or GPU, a few minutes.
#
#   scripts/pretrain_deepseek_tiny.sh [FOLDER] [FLAGS]    everything goes to FOLDER (default: runs/deepseek_tiny);
#       FLAGS are given to pretrain_deepseek.py after those below, e.g.
#       --expert-model-parallel-size 4                   a quarter of the experts on each rank
#       --pipeline-model-parallel-size 2 --context-parallel-size 1
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
folder="$REPOSITORY_ROOT/runs/deepseek_tiny"
case "${1:---}" in --*) ;; *) folder="$1"; shift ;; esac
ensure_environment run
mkdir -p "$folder"
folder="$(cd "$folder" && pwd)"
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

tokenizer=(--tokenizer-type SentencePieceTokenizer --tokenizer-model data/shakespeare_spm_2k.model)
if [ ! -e "$folder/text_text_document.idx" ]; then
    "$PYTHON" -m megatron.tools.preprocess_data --input data/shakespeare.jsonl.gz "${tokenizer[@]}" \
        --append-eod --workers 2 --output-prefix "$folder/text" --log-interval 1000000
fi
parallel=(
    --expert-model-parallel-size 2 --context-parallel-size 2
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
)
training=(
    --train-iters 100 --micro-batch-size 4 --global-batch-size 8
    --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-iters 10
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --data-path "$folder/text_text_document" --split 90,10,0 --data-cache-path "$folder/cache" --num-workers 0
    --eval-interval 50 --eval-iters 5 --log-interval 10 --log-throughput
    --metrics-file "$folder/metrics.jsonl"
)
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
    --local-addr 127.0.0.1 pretrain_deepseek.py --preset deepseek-v3-tiny "${parallel[@]}" "${tokenizer[@]}" \
    "${training[@]}" "$@"
