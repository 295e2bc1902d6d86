#!/usr/bin/env bash
# Pretrain DeepSeek-V3 (671 B) on many nodes of 8 GPUs: expert parallel 64, ZeRO-3 over all ranks, bf16 with fp32 main
# parameters, full recompute. The layout is explained in docs/concepts/moe.md. Run once on every node:
#
#   SLURM:     sbatch --nodes=256 scripts/slurm.sbatch scripts/pretrain_deepseek_v3_671b.sh DATA_PREFIX TOKENIZER [FLAGS]
#   torchrun:  NODES=256 NODE_RANK=3 MASTER_ADDR=host0 scripts/pretrain_deepseek_v3_671b.sh DATA_PREFIX TOKENIZER [FLAGS]
#
# Layout, of 2048 GPUs: 4 experts of each layer on a GPU, so that a node's 8 GPUs send a token to few other nodes; experts
# sharded over the 32 GPUs that hold the same ones, everything else over all. How ranks are started: scripts/launch.sh.
#
# DATA_PREFIX: of a .bin/.idx pair, or "mock". TOKENIZER: a Hugging Face tokenizer, 129280 words. FLAGS come last and win:
#   --pipeline-model-parallel-size 16 --data-parallel-sharding-strategy optim
#   --validate-only        print the resolved configuration (WORLD_SIZE=2048 set) and stop
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/launch.sh"

data="${1:-}" tokenizer="${2:-}"
case "$data" in "" | -h | --help) show_usage; exit $(($# < 1 ? 2 : 0)) ;; esac
data_words "$data" "$tokenizer"
shift; [ "$data" = mock ] || shift

words=(
    --preset deepseek-v3-671b
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --bf16 --megatron-fsdp-main-params-dtype fp32 --grad-reduce-in-bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --micro-batch-size 1 --global-batch-size 16384 --train-samples 3613281250
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-samples 3072000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    "${DATA_WORDS[@]}"
    --eval-interval 1000 --eval-iters 8 --log-interval 1 --log-throughput --distributed-timeout-minutes 30
    --save checkpoints/deepseek-v3-671b --load checkpoints/deepseek-v3-671b --save-interval 500
)
launch pretrain_deepseek.py "${words[@]}" "$@"
