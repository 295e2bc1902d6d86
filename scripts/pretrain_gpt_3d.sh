#!/usr/bin/env bash
# Three dimensions: tensor x pipeline x data parallelism on 8 ranks (2 x 2 x 2), with sequence parallelism and
# ZeRO-3 over the data-parallel ranks of each stage and tensor rank. CPU or GPU, on mock data.
#
#   scripts/pretrain_gpt_3d.sh [FLAGS]     FLAGS are given to pretrain_gpt.py after those below, e.g.
#       --num-virtual-stages-per-pipeline-rank 2          interleaved 1F1B
#       --delay-wgrad-compute                             zero bubble
#       --data-parallel-sharding-strategy optim_grads     ZeRO-2
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
ensure_environment run
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

parallel=(
    --tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
)
model=(
    --num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
    --attention-dropout 0 --hidden-dropout 0
)
training=(
    --train-iters 20 --micro-batch-size 2 --global-batch-size 16 --lr 1e-3 --lr-decay-style cosine
    --lr-warmup-iters 2 --clip-grad 1.0 --mock-data --tokenizer-type NullTokenizer --vocab-size 512
    --num-workers 0 --log-interval 5 --eval-interval 20 --eval-iters 2
)
exec "$PYTHON" -m torch.distributed.run --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:0 \
    --local-addr 127.0.0.1 pretrain_gpt.py "${parallel[@]}" "${model[@]}" "${training[@]}" "$@"
