"""Training that began with megatron-core and goes on with ours.

python -m tests.unit.tools.convert.core_runs FOLDER EXPERTS...: the first part.
"""

from __future__ import annotations

import json
import multiprocessing.dummy
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil  # noqa: F401 - megatron-core's writers, without it, end and are waited for without end
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

VOCABULARY, SEQUENCE, BATCH, STEPS = 64, 16, 4, 4
LR, MIN_LR, DECAY, WEIGHT_DECAY = 0.01, 0.001, 10, 0.1


def batch(step: int) -> Tensor:
    """Tokens [batch, sequence + 1] of a step, from 0."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)


def arguments(experts: int) -> dict[str, Any]:
    """What Megatron-LM would have saved."""
    shape = {
        "num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 48, "num_attention_heads": 4, "kv_channels": 8,
        "group_query_attention": True, "num_query_groups": 2, "max_position_embeddings": SEQUENCE,
        "seq_length": SEQUENCE, "position_embedding_type": "rope", "rotary_base": 10000, "normalization": "RMSNorm",
        "norm_epsilon": 1e-5, "layernorm_epsilon": 1e-5, "swiglu": True, "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
        "vocab_size": VOCABULARY - 3, "consumed_train_samples": 2 * BATCH, "consumed_valid_samples": 0,
    }  # fmt: skip
    if experts:
        shape |= {"num_experts": experts, "moe_ffn_hidden_size": 24, "moe_router_topk": 2}
    return shape


def _model(experts: int) -> Any:
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    tensor_parallel.model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(7)
    extra: dict[str, Any] = {}
    if experts:
        extra = {
            "num_moe_experts": experts, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "alltoall", "moe_router_load_balancing_type": "none",
        }  # fmt: skip
    config = TransformerConfig(
        num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2, kv_channels=8,
        use_cpu_initialization=True, gradient_accumulation_fusion=False, bias_dropout_fusion=False,
        bias_activation_fusion=False, masked_softmax_fusion=False, persist_layer_norm=False, apply_rope_fusion=False,
        hidden_dropout=0.0, attention_dropout=0.0, normalization="RMSNorm", add_bias_linear=False,
        gated_linear_unit=True, activation_func=F.silu, init_method_std=0.1, **extra,
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(num_experts=experts or None, normalization="RMSNorm")
    return GPTModel(
        config, spec, vocab_size=VOCABULARY, max_sequence_length=SEQUENCE, position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )  # fmt: skip


def _loss(model: Any, step: int) -> Tensor:
    tokens = batch(step)
    positions = torch.arange(SEQUENCE)[None].expand(BATCH, -1)
    mask = torch.triu(torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool), 1)[None, None]
    # Words that only the padded vocabulary has must not count, as in a run with this vocabulary.
    labels = tokens[:, 1:].clamp(max=VOCABULARY - 4).contiguous()
    logits = model(tokens[:, :-1].clamp(max=VOCABULARY - 4).contiguous(), positions, mask)[
        ..., : VOCABULARY - 3
    ]
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def train_with_core(folder: Path, experts: int) -> list[float]:
    """Four steps of AdamW with megatron-core; the checkpoint in `folder` is of the second. Returns the losses."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.optimizer import (
        get_param_id_to_sharded_param_map,
        optim_state_to_sharding_state,
    )
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    try:
        model = _model(experts)
        decayed = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": decayed, "wd_mult": 1.0}, {"params": plain, "wd_mult": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
        schedule = OptimizerParamScheduler(
            optimizer, init_lr=0.0, max_lr=LR, min_lr=MIN_LR, lr_warmup_steps=0, lr_decay_steps=DECAY * BATCH,
            lr_decay_style="linear", start_wd=WEIGHT_DECAY, end_wd=WEIGHT_DECAY, wd_incr_steps=DECAY * BATCH,
            wd_incr_style="constant",
        )  # fmt: skip
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = _loss(model, step)
            loss.backward()
            optimizer.step()
            schedule.step(BATCH)
            losses.append(float(loss))
            if step == 1:
                weights = model.sharded_state_dict()
                state = optimizer.state_dict()
                names = get_param_id_to_sharded_param_map(weights, decayed + plain)
                optim_state_to_sharding_state(state, names, exclude_keys=("step",))
                state["state"]["common_step"] = 2
                everything = {
                    "model": weights,
                    "optimizer": state,
                    "opt_param_scheduler": schedule.state_dict(),
                    "args": Namespace(**arguments(experts)),
                    "iteration": 2,
                }
                folder.mkdir(parents=True)
                dist_checkpointing.save(everything, str(folder))
        return losses
    finally:
        parallel_state.destroy_model_parallel()


def go_on(rank: int, world: int, folder: Path, layout: str) -> tuple[list[float], int, int]:
    """Losses of steps 3 and 4 with ours; iteration and consumed samples that the checkpoint said."""
    from megatron.train.arguments import parse_args, validate
    from megatron.train.arguments.saved import complete_from_checkpoint
    from megatron.train.build import build_run, step_options
    from megatron.train.initialize import Launch, seed_everything
    from megatron.train.resume import load_run
    from megatron.train.step import BatchSize, TrainStep

    words = (
        f"--load {folder} --use-checkpoint-args --mock-data --tokenizer-type NullTokenizer --vocab-size "
        f"{VOCABULARY - 4} --micro-batch-size {BATCH // world} --global-batch-size {BATCH} --seq-length {SEQUENCE} "
        f"--lr {LR} --min-lr {MIN_LR} --lr-decay-iters {DECAY} --lr-decay-style linear --weight-decay {WEIGHT_DECAY} "
        f"--adam-beta2 0.95 --clip-grad 0 --train-iters {DECAY} --num-workers 0 --attention-dropout 0 "
        f"--hidden-dropout 0 --moe-router-load-balancing-type none --use-megatron-fsdp {layout}"
    )
    given, _ = complete_from_checkpoint(parse_args(words.split()))
    config = validate(given, world, "cpu")
    seed_everything(config.seed)
    run = build_run(config, Launch(rank, world, rank, world), torch.device("cpu"))
    progress, _ = load_run(run)
    step = TrainStep(run.state, run.mesh, step_options(config))
    losses = []
    for number in range(progress.iteration, STEPS):
        tokens = batch(number).clamp(max=VOCABULARY - 4).chunk(world)[rank]
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        mine = {"tokens": inputs, "labels": labels, "loss_mask": torch.ones(labels.shape)}
        losses.append(step(iter([mine]), BatchSize(1, BATCH)).loss)
    assert run.data.train is not None
    return losses, progress.iteration, run.data.train.consumed_samples


def go_on_with_all(
    rank: int, world: int, folders: list[Path], layout: str
) -> list[tuple[list[float], int, int]]:
    """`go_on` for each folder."""
    return [go_on(rank, world, folder, layout) for folder in folders]


def write_by_threads() -> None:
    """Let megatron-core write files by threads: the processes that it forks beside gloo's threads hang now and then."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    threads = SimpleNamespace(get_context=lambda _method: multiprocessing.dummy)
    filesystem_async.mp = threads  # type: ignore[attr-defined]


def main(folder: str, experts: list[str]) -> None:
    """Train each model; print {experts: losses}."""
    from tests.mcore.shim import install

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    install()
    write_by_threads()
    losses = {count: train_with_core(Path(folder) / count / "iter_0000002", int(count)) for count in experts}
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
