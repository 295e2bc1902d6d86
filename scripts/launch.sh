# Sourced by the pretrain_*.sh scripts: `launch PROGRAM WORDS...` starts the ranks of this node, or of this task.
#
#   one machine     PROCESSES ranks (default: one for each GPU, 2 without any) by torchrun
#   several         the same command on each with NODES=4 NODE_RANK=0..3 MASTER_ADDR=first-host [MASTER_PORT=29500]
#   SLURM           srun --ntasks-per-node=1: torchrun in each task; with several tasks a node each task is a rank,
#                   without torchrun. scripts/slurm.sbatch does either.
#   --validate-only among the words: one process prints the configuration of WORLD_SIZE ranks
#   PRINT_ONLY=1    prints the command, one word a line, and starts nothing

source "$(dirname "${BASH_SOURCE[0]}")/env.sh"

# Sets DATA_WORDS for a .bin/.idx prefix and a Hugging Face tokenizer; "mock" stands for random tokens.
data_words() {
    case "$1" in -*) say "$1: give DATA and TOKENIZER, or mock, before flags; see --help"; exit 2 ;; esac
    if [ "$1" != mock ] && [ -z "$2" ]; then
        say "$1: give its TOKENIZER too; see --help"
        exit 2
    fi
    if [ "$1" = mock ]; then
        DATA_WORDS=(--mock-data --tokenizer-type NullTokenizer)
    else
        DATA_WORDS=(--data-path "$1" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$2")
    fi
}

_processes() {
    local gpus
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)"
    echo "${PROCESSES:-$((gpus > 0 ? gpus : 2))}"
}

launch() {
    local program="$1" command nodes=1 node_rank=0 master
    shift
    ensure_environment run
    cd "$REPOSITORY_ROOT"
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
    command=("$PYTHON" "$program" "$@")
    if [ -n "${SLURM_STEP_NUM_TASKS:-}" ]; then
        nodes="${SLURM_STEP_NUM_NODES:-${SLURM_NNODES:-1}}" node_rank="${SLURM_NODEID:-0}"
        master="${MASTER_ADDR:-$(scontrol show hostnames "${SLURM_STEP_NODELIST:-${SLURM_JOB_NODELIST:-}}" 2>/dev/null | sed -n 1p || true)}"
    else
        nodes="${NODES:-1}" node_rank="${NODE_RANK:-0}" master="${MASTER_ADDR:-}"
    fi
    case " $* " in
        *" --validate-only "*) ;;
        *)
            if [ "${SLURM_STEP_NUM_TASKS:-0}" -gt "$nodes" ]; then
                : # a task is a rank: the program reads SLURM's variables
            elif [ "$nodes" -eq 1 ]; then
                command=("$PYTHON" -m torch.distributed.run --nproc-per-node "$(_processes)" --rdzv-backend c10d
                    --rdzv-endpoint 127.0.0.1:0 --local-addr 127.0.0.1 "$program" "$@")
            else
                command=("$PYTHON" -m torch.distributed.run --nnodes "$nodes" --node-rank "$node_rank"
                    --nproc-per-node "$(_processes)" --master-addr "${master:-127.0.0.1}"
                    --master-port "${MASTER_PORT:-29500}" "$program" "$@")
            fi
            ;;
    esac
    if [ -n "${PRINT_ONLY:-}" ]; then
        printf '%s\n' "${command[@]}"
        return
    fi
    exec "${command[@]}"
}
