#!/usr/bin/env bash
# Pretrain GPT-2 medium (345 M parameters) on one machine, with GPUs or on its CPU.
#
#   scripts/pretrain_gpt_345m.sh DATA_PREFIX TOKENIZER [FLAGS]
#   PROCESSES=2 scripts/pretrain_gpt_345m.sh mock --num-layers 2 --hidden-size 64 --num-attention-heads 4 ...   a trial
#
# DATA_PREFIX: of a .bin/.idx pair (python -m megatron.tools.preprocess_data), or "mock" for random tokens.
# TOKENIZER: a Hugging Face tokenizer.json or folder; none with mock. FLAGS come last and win (docs/flags.md).
#
# Layout: data parallelism alone. Weights, gradients and Adam's states take 16 bytes a parameter, 5.5 GB: every GPU holds
# the model, so nothing need be gathered in forward or backward; only the optimizer's states are sharded (ZeRO-1), which
# costs no further communication. How ranks are started: scripts/launch.sh.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

data="${1:-}" tokenizer="${2:-}"
case "$data" in "" | -h | --help) show_usage; exit $(($# < 1 ? 2 : 0)) ;; esac
data_words "$data" "$tokenizer"
shift; [ "$data" = mock ] || shift

parallel=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
model=(
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024
    --position-embedding-type learned_absolute --normalization LayerNorm --vocab-size 50257
    --attention-dropout 0.1 --hidden-dropout 0.1 --init-method-std 0.02
)
training=(
    --bf16 --micro-batch-size 8 --global-batch-size 512 --train-iters 300000
    --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-fraction 0.01
    --weight-decay 0.1 --adam-beta2 0.95 --clip-grad 1.0
    --eval-interval 1000 --eval-iters 10 --log-interval 10 --log-throughput
    --save checkpoints/gpt-345m --load checkpoints/gpt-345m --save-interval 2000
)
launch pretrain_gpt.py "${parallel[@]}" "${model[@]}" "${DATA_WORDS[@]}" "${training[@]}" "$@"
