"""The launch scripts: the models and layouts they name, at their real size and at a tiny one that runs."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from megatron.models.presets import preset_flags
from megatron.train.arguments import parse_args, validate
from megatron.train.config import TrainConfig
from pretrain_deepseek import words as with_preset

ROOT = Path(__file__).resolve().parents[2]
TINY = (
    "--hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16 "
    "--vocab-size 64 --micro-batch-size 1 --log-interval 1 --eval-iters 1 --num-workers 0"
)
# Samples instead of iterations, and their warm-up, are what the larger scripts count in.
SAMPLES = "--train-samples 32 --lr-warmup-samples 8 --global-batch-size 8"
EXPERTS = "--num-experts 4 --moe-ffn-hidden-size 16 --expert-model-parallel-size 2"


@dataclass(frozen=True)
class Script:
    """world: ranks of the real layout. tiny, tiny_world: words and ranks of the run on CPU. tokens: of a real step."""

    preset: str
    world: int
    tiny: str
    tiny_world: int
    tokens: int


SCRIPTS = {
    "gpt_345m": Script("gpt-345m", 8, "--num-layers 2 --train-iters 4 --global-batch-size 4", 2, 512 * 1024),
    "llama_7b": Script("llama2-7b", 8, f"--num-layers 2 {SAMPLES}", 2, 1024 * 4096),
    "llama_70b": Script(
        "llama2-70b",
        128,
        f"--num-layers 4 --num-query-groups 2 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
        f"--num-layers-per-virtual-pipeline-stage 1 {SAMPLES}",
        4,
        1024 * 4096,
    ),
    "mixtral_8x7b": Script(
        "mixtral-8x7b", 32, f"--num-layers 2 --num-query-groups 2 {EXPERTS} {SAMPLES}", 4, 1024 * 4096
    ),
    "deepseek_v3_671b": Script(
        "deepseek-v3-671b",
        2048,
        f"--num-layers 2 --moe-layer-freq ([0]*1+[1]*1) {EXPERTS} --moe-router-topk 2 --moe-router-num-groups 2 "
        "--moe-router-group-topk 1 --moe-shared-expert-intermediate-size 16 --q-lora-rank 8 --kv-lora-rank 8 "
        "--qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 8 --yarn-original-max-position-embeddings 16 "
        f"{SAMPLES}",
        4,
        16384 * 4096,
    ),
}


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "TORCHELASTIC"))
    }
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        clean.pop(name, None)
    environment = {**clean, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=600, check=False, cwd=ROOT
    )


def command_of(name: str, words: str = "", **variables: str) -> list[str]:
    """The command that a script would start, with random tokens."""
    script = str(ROOT / "scripts" / f"pretrain_{name}.sh")
    done = run([script, "mock", *words.split()], PRINT_ONLY="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def configuration(command: list[str], world: int) -> TrainConfig:
    """What the program of `command` would make of its words."""
    at = next(index for index, word in enumerate(command) if word.startswith("pretrain_"))
    words = command[at + 1 :]
    return validate(parse_args(with_preset(words) if "deepseek" in command[at] else words), world, "cpu")


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_layout_is_legal_and_the_model_is_the_one_named(name: str) -> None:
    script = SCRIPTS[name]
    config = configuration(command_of(name), script.world)
    assert config.global_batch_size * config.seq_length == script.tokens
    wanted = vars(parse_args(preset_flags(script.preset)))
    explicit = wanted.pop("explicit")
    resolved = {
        "moe_layer_freq",
        "moe_router_load_balancing_type",
        "moe_aux_loss_coeff",
        "moe_token_dispatcher_type",
    }
    different = {key for key in explicit - resolved if getattr(config, key) != wanted[key]}
    assert not different
    grid = config.tensor_model_parallel_size * config.pipeline_model_parallel_size
    assert config.num_microbatches >= 4 * config.pipeline_model_parallel_size, "the pipeline would idle"
    # What the comment says of tensor parallelism: it stays inside a node of 8.
    assert config.tensor_model_parallel_size <= 8 and script.world % grid == 0
    assert "Layout" in (ROOT / "scripts" / f"pretrain_{name}.sh").read_text()


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_tiny_override_is_legal(name: str) -> None:
    script = SCRIPTS[name]
    config = configuration(command_of(name, f"{TINY} {script.tiny}"), script.tiny_world)
    assert config.hidden_size == 32 and config.num_microbatches >= 1


def test_ranks_are_started_as_the_machine_asks() -> None:
    """One machine, several by hand, SLURM with torchrun in each task, SLURM with a task for each rank."""
    words = command_of("gpt_345m", PROCESSES="3")
    assert words[words.index("--nproc-per-node") + 1] == "3" and "--rdzv-endpoint" in words
    words = command_of("gpt_345m", PROCESSES="8", NODES="4", NODE_RANK="2", MASTER_ADDR="host0")
    assert words[words.index("--nnodes") + 1] == "4" and words[words.index("--node-rank") + 1] == "2"
    assert words[words.index("--master-addr") + 1] == "host0"
    step = {"SLURM_STEP_NUM_NODES": "4", "SLURM_NODEID": "3", "SLURM_PROCID": "3", "MASTER_ADDR": "host7"}
    words = command_of("gpt_345m", PROCESSES="8", SLURM_STEP_NUM_TASKS="4", **step)
    assert words[words.index("--node-rank") + 1] == "3" and words[words.index("--master-addr") + 1] == "host7"
    words = command_of("gpt_345m", SLURM_STEP_NUM_TASKS="32", **step)
    assert "torch.distributed.run" not in words and words[1] == "pretrain_gpt.py"
    words = command_of("gpt_345m", "--validate-only")
    assert words[1] == "pretrain_gpt.py" and words[-1] == "--validate-only"


FAKE_SRUN = """#!/usr/bin/env bash
# Two tasks on one node, as srun starts them.
while [[ "${1:-}" == --* ]]; do shift; done
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NODEID=0 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NUM_NODES=1 \\
        SLURM_STEP_TASKS_PER_NODE=2 SLURM_STEP_NODELIST=127.0.0.1 SLURM_JOB_ID=$$ "$@" &
    pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line["lm_loss"] for line in lines if "lm_loss" in line]


def test_slurm_runs_the_tiny_gpt_without_torchrun(tmp_path: Path) -> None:
    """sbatch -> srun -> script -> two ranks that meet by SLURM's variables alone; it trains on CPU."""
    srun = tmp_path / "srun"
    srun.write_text(FAKE_SRUN)
    srun.chmod(0o755)
    tail = f"{TINY} {SCRIPTS['gpt_345m'].tiny} --metrics-file {tmp_path}/metrics.jsonl --save {tmp_path}/save"
    script = ["scripts/slurm.sbatch", "scripts/pretrain_gpt_345m.sh", "mock", *tail.split()]
    done = run([*script, "--load", str(tmp_path / "save")], PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "2 ranks (slurm) on cpu" in done.stdout
    assert len(losses(tmp_path)) == 4
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.full
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_tiny_model_trains(name: str, tmp_path: Path) -> None:
    script = SCRIPTS[name]
    tail = f"{TINY} {script.tiny} --metrics-file {tmp_path}/metrics.jsonl --save {tmp_path}/save --load {tmp_path}/save"
    path = str(ROOT / "scripts" / f"pretrain_{name}.sh")
    done = run([path, "mock", *tail.split()], PROCESSES=str(script.tiny_world))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert len(losses(tmp_path)) == 4 and all(loss < 6 for loss in losses(tmp_path))
