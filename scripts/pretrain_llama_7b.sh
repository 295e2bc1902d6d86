#!/usr/bin/env bash
# Pretrain a 7 B model of Llama 2's shape on one node of 8 GPUs (or more nodes: data parallelism grows).
#
#   scripts/pretrain_llama_7b.sh DATA_PREFIX TOKENIZER [FLAGS]
#
# DATA_PREFIX: of a .bin/.idx pair (python -m megatron.tools.preprocess_data), or "mock" for random tokens.
# TOKENIZER: a Hugging Face tokenizer.json or folder; none with mock. FLAGS come last and win (docs/flags.md).
#
# Layout: ZeRO-3 over all GPUs and nothing else. 16 bytes a parameter are 108 GB, 13.5 GB on each of 8 GPUs. Each layer's
# weights (0.4 GB) are gathered just before their use, behind the layer before; a micro batch of one sequence is enough
# work to hide that on NVLink. Tensor parallelism would halve the size of every matrix product for no need. On many nodes
# keep gathers inside a node: --num-distributed-optimizer-instances NODES. Recompute of attention's core alone keeps
# activations at 8 GPUs' memory. How ranks are started: scripts/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

data="${1:-}" tokenizer="${2:-}"
case "$data" in "" | -h | --help) show_usage; exit $(($# < 1 ? 2 : 0)) ;; esac
data_words "$data" "$tokenizer"
shift; [ "$data" = mock ] || shift

parallel=(
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --recompute-granularity selective --recompute-modules core_attn
)
model=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32
    --seq-length 4096 --max-position-embeddings 4096 --position-embedding-type rope --vocab-size 32000
    --normalization RMSNorm --norm-epsilon 1e-5 --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --init-method-std 0.02
)
training=(
    --bf16 --micro-batch-size 1 --global-batch-size 1024 --train-samples 488281250
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-samples 2048000
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 1 --log-throughput
    --save checkpoints/llama-7b --load checkpoints/llama-7b --save-interval 1000
)
launch pretrain_gpt.py "${parallel[@]}" "${model[@]}" "${DATA_WORDS[@]}" "${training[@]}" "$@"
