#!/usr/bin/env bash
# Pretrain a 70 B model of Llama 2's shape on 16 nodes of 8 GPUs.
#
#   torchrun   NODES=16 NODE_RANK=3 MASTER_ADDR=host0 scripts/pretrain_llama_70b.sh DATA_PREFIX TOKENIZER [FLAGS]
#   SLURM      sbatch --nodes=16 scripts/slurm.sbatch scripts/pretrain_llama_70b.sh DATA_PREFIX TOKENIZER [FLAGS]
#
# DATA_PREFIX: of a .bin/.idx pair (python -m megatron.tools.preprocess_data), or "mock" for random tokens.
# TOKENIZER: a Hugging Face tokenizer.json or folder; none with mock. FLAGS come last and win (docs/flags.md).
#
# Layout, of 128 GPUs: tensor 8 x pipeline 4 x data 4. Tensor parallelism, which talks in every layer, stays inside a node's
# NVLink, with the sequence cut too so that norms and dropouts are not held eight times. Four stages of 20 layers, five
# times interleaved (4 layers each), so that with 256 microbatches the pipeline idles for 3 / (256 x 5) of a step. What is
# left is data parallelism with ZeRO-1: a GPU holds 1/32 of the model, 2.2 B parameters: 4.4 GB of weights, 8.7 GB of
# gradients, 6.5 GB of states. Gathering weights for each of 256 microbatches (ZeRO-3) would cost more than it saves.
# How ranks are started: scripts/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

data="${1:-}" tokenizer="${2:-}"
case "$data" in "" | -h | --help) show_usage; exit $(($# < 1 ? 2 : 0)) ;; esac
data_words "$data" "$tokenizer"
shift; [ "$data" = mock ] || shift

parallel=(
    --tensor-model-parallel-size 8 --sequence-parallel
    --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 4
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
)
model=(
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64
    --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --vocab-size 32000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 1024 --train-samples 488281250
    --lr 1.5e-4 --min-lr 1.5e-5 --lr-decay-style cosine --lr-warmup-samples 2048000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput --distributed-timeout-minutes 30
    --save checkpoints/llama-70b --load checkpoints/llama-70b --save-interval 500
)
launch pretrain_gpt.py "${parallel[@]}" "${model[@]}" "${DATA_WORDS[@]}" "${training[@]}" "$@"
