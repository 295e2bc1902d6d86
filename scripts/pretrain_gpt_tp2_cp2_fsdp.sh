#!/usr/bin/env bash
# Tensor, sequence and context parallelism with ZeRO-3: a small GPT on 4 ranks, 2 tensor-parallel x 2
# context-parallel, with sequence parallelism; each tensor rank's parameters, gradients and optimizer state are
# sharded over the context (and data-parallel) ranks. CPU or GPU, on mock data.
#
#   scripts/pretrain_gpt_tp2_cp2_fsdp.sh [FLAGS]     FLAGS are given to pretrain_gpt.py after those below, e.g.
#       --cp-comm-type a2a                                Ulysses instead of the ring
#       --reset-attention-mask --reset-position-ids       documents packed in a sample do not see each other
#       --data-parallel-sharding-strategy optim_grads     ZeRO-2
# RANKS=8 in the environment adds data parallelism of 2.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

case "${1:-}" in -h | --help) show_usage; exit 0 ;; esac
ensure_environment run
cd "$REPOSITORY_ROOT"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

parallel=(
    --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --cp-comm-type p2p
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
exec "$PYTHON" -m torch.distributed.run --nproc-per-node "${RANKS:-4}" --rdzv-backend c10d \
    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 pretrain_gpt.py "${parallel[@]}" "${model[@]}" \
    "${training[@]}" "$@"
