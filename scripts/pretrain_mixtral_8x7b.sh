#!/usr/bin/env bash
# Pretrain Mixtral 8x7B (47 B parameters, 13 B of them for each token) on 4 nodes of 8 GPUs.
#
#   torchrun   NODES=4 NODE_RANK=3 MASTER_ADDR=host0 scripts/pretrain_mixtral_8x7b.sh DATA_PREFIX TOKENIZER [FLAGS]
#   SLURM      sbatch --nodes=4 scripts/slurm.sbatch scripts/pretrain_mixtral_8x7b.sh DATA_PREFIX TOKENIZER [FLAGS]
#
# DATA_PREFIX: of a .bin/.idx pair (python -m megatron.tools.preprocess_data), or "mock" for random tokens.
# TOKENIZER: a Hugging Face tokenizer.json or folder; none with mock. FLAGS come last and win (docs/flags.md).
#
# Layout, of 32 GPUs: expert parallelism 8, one expert of each layer on each GPU of a node, so that tokens travel by
# NVLink only; everything else is ZeRO-3: experts over the 4 GPUs of the nodes that hold the same one, attention, router
# and embeddings over all 32. 45 B parameters of experts at 16 bytes are 22 GB on a GPU. Weights of experts are gathered
# once for all tokens that came, which is why experts stay whole (--expert-tensor-parallel-size 1). Experts are recomputed
# in backward: their activations are two tokens' for each token. How ranks are started: scripts/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

data="${1:-}" tokenizer="${2:-}"
case "$data" in "" | -h | --help) show_usage; exit $(($# < 1 ? 2 : 0)) ;; esac
data_words "$data" "$tokenizer"
shift; [ "$data" = mock ] || shift

parallel=(
    --expert-model-parallel-size 8 --expert-tensor-parallel-size 1 --moe-token-dispatcher-type alltoall
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --recompute-granularity selective --recompute-modules core_attn moe
)
model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --rotary-base 1000000
    --seq-length 4096 --max-position-embeddings 32768 --position-embedding-type rope --vocab-size 32000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
    --num-experts 8 --moe-router-topk 2 --moe-router-dtype fp32
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.02 --moe-grouped-gemm
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 1024 --train-samples 488281250
    --lr 1e-4 --min-lr 1e-5 --lr-decay-style cosine --lr-warmup-samples 2048000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput --distributed-timeout-minutes 30
    --save checkpoints/mixtral-8x7b --load checkpoints/mixtral-8x7b --save-interval 500
)
launch pretrain_gpt.py "${parallel[@]}" "${model[@]}" "${DATA_WORDS[@]}" "${training[@]}" "$@"
