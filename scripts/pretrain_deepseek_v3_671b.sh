#!/usr/bin/env bash
# Pretrain DeepSeek-V3 (671 B) on many nodes of 8 GPUs: expert parallel 64, ZeRO-3 over all ranks, bf16 with fp32 main
# parameters, full recompute. The layout is explained in docs/concepts/moe.md. Run once on every node:
#
#   SLURM:     srun --nodes=256 --ntasks-per-node=1 scripts/pretrain_deepseek_v3_671b.sh DATA_PREFIX TOKENIZER [FLAGS]
#   torchrun:  NODES=256 NODE_RANK=3 MASTER_ADDR=host0 scripts/pretrain_deepseek_v3_671b.sh DATA_PREFIX TOKENIZER [FLAGS]
#
# DATA_PREFIX: of a .bin/.idx pair. TOKENIZER: a Hugging Face tokenizer, 129280 words. FLAGS come last and win, e.g.
#   --pipeline-model-parallel-size 16 --data-parallel-sharding-strategy optim
#   --validate-only        print the resolved configuration (WORLD_SIZE=2048 set) and stop
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

if [ "$#" -lt 2 ] || [ "$1" = -h ] || [ "$1" = --help ]; then
    sed -n '2,/^set /{/^set /!p}' "${BASH_SOURCE[0]}" | sed 's/^# \{0,1\}//'
    exit $(($# < 2 ? 2 : 0))
fi
data="$1" tokenizer="$2"
shift 2
ensure_environment run
cd "$REPOSITORY_ROOT"

nodes="${SLURM_NNODES:-${NODES:-1}}"
node_rank="${SLURM_NODEID:-${NODE_RANK:-0}}"
master="${MASTER_ADDR:-}"
if [ -z "$master" ] && [ -n "${SLURM_JOB_NODELIST:-}" ]; then
    master="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)"
fi

words=(
    --preset deepseek-v3-671b
    --expert-model-parallel-size 64 --expert-tensor-parallel-size 1
    --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params
    --bf16 --megatron-fsdp-main-params-dtype fp32 --grad-reduce-in-bf16
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1
    --micro-batch-size 1 --global-batch-size 16384 --train-samples 3613281250
    --lr 2.2e-4 --min-lr 2.2e-5 --lr-decay-style cosine --lr-warmup-samples 3072000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --data-path "$data" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer"
    --eval-interval 1000 --eval-iters 8 --log-interval 1 --log-throughput --distributed-timeout-minutes 30
    --save checkpoints/deepseek-v3-671b --load checkpoints/deepseek-v3-671b --save-interval 500
)
case " $* " in
    *" --validate-only "*) exec "$PYTHON" pretrain_deepseek.py "${words[@]}" "$@" ;;
esac
exec "$PYTHON" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node_rank" --nproc-per-node 8 \
    --master-addr "${master:-127.0.0.1}" --master-port "${MASTER_PORT:-29500}" \
    pretrain_deepseek.py "${words[@]}" "$@"
