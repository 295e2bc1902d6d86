"""All ranks of a layout in one process: models and optimizers on a process group that moves nothing.

What a checkpoint needs of a rank is arithmetic (its boxes in the whole model) and its own numbers, so saving and
loading need no second process: `save` merges the ranks' plans as a run's first rank does and writes each file.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import SavePlan
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron.fsdp import checkpoint as fsdp_checkpoint
from megatron.train.arguments import parse_args, validate
from megatron.train.arguments.model import model_config_from
from megatron.train.build import build_backend, build_mesh, build_model
from megatron.train.checkpoint import (
    CheckpointReader,
    LoadOptions,
    Progress,
    RunRecord,
    Target,
    directory_of,
    load_tensors,
)
from megatron.train.checkpoint.plan import local_plan, merge_plans
from megatron.train.checkpoint.save import publish
from megatron.train.checkpoint.shard import live_source, write_shard
from megatron.train.optimizer import build_optimizer, optimizer_config
from megatron.train.resume import BUFFER_PREFIX, MODEL_PREFIX, OPTIMIZER_PREFIX, model_tensors

VOCABULARY = 30
CPU = torch.device("cpu")
COMMON = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 --lr 0.01 "
    "--mock-data --tokenizer-type NullTokenizer --vocab-size 30 --make-vocab-size-divisible-by 8 --train-iters 2 "
    "--use-megatron-fsdp --attention-dropout 0 --hidden-dropout 0"
)


@dataclass
class PaperRank:
    """What one rank would save and load: its tensors by key, and its plan."""

    tensors: dict[str, Any]
    plan: SavePlan


@contextlib.contextmanager
def paper_group(rank: int, world: int) -> Iterator[None]:
    """torch.distributed as rank `rank` of `world` sees it, with collectives that move nothing."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def build_ranks(world: int, words: str) -> list[PaperRank]:
    """Every rank of a layout; model as initialised, optimizer state of AdamW zero."""
    ranks = []
    for rank in range(world):
        with paper_group(rank, world):
            config = validate(parse_args(f"{COMMON} {words} --global-batch-size 24".split()), world, "cpu")
            mesh = build_mesh(config, CPU)
            backend = build_backend(config, mesh, None)
            model = build_model(model_config_from(config, VOCABULARY), backend, config, mesh, CPU)
            optimizer = build_optimizer(model.named_parameters(), optimizer_config(config))
            tensors = model_tensors(model)  # type: ignore[arg-type]
            shapes = {}
            for name, managed in fsdp_checkpoint.managed_parameters(model).items():
                whole = torch.Size(managed.info.location.global_shape)
                for key in ("exp_avg", "exp_avg_sq"):
                    shapes[f"{OPTIMIZER_PREFIX}{name}.{key}"] = (whole, torch.float32)
                shapes[f"{OPTIMIZER_PREFIX}{name}.step"] = (torch.Size(()), torch.float32)
            fsdp_checkpoint.allocate_optimizer_state(optimizer, shapes, OPTIMIZER_PREFIX)
            for name, values in fsdp_checkpoint.optimizer_state(optimizer).items():
                tensors |= {f"{OPTIMIZER_PREFIX}{name}.{key}": value for key, value in values.items()}
            ranks.append(PaperRank(tensors, local_plan(tensors)))
    return ranks


def save(root: Path, iteration: int, ranks: list[PaperRank]) -> None:
    """Write the checkpoint that these ranks would write together."""
    target = Target(root, RunRecord(Progress(iteration), {}, {}, {}, {}, world_size=len(ranks)))
    target.partial.mkdir(parents=True)
    plans, metadata = merge_plans([rank.plan for rank in ranks])
    written = [
        write_shard(target.partial, plan, live_source(rank.tensors))
        for rank, plan in zip(ranks, plans, strict=True)
    ]
    publish(target, metadata, written)


def load(root: Path, iteration: int, ranks: list[PaperRank]) -> None:
    """Every rank loads its part, into tensors that hold something else."""
    for rank in ranks:
        for value in rank.tensors.values():
            local(value).fill_(-1)
        load_tensors(root, iteration, rank.tensors, LoadOptions("raise_unexpected"))


def local(value: Any) -> torch.Tensor:
    """This rank's part of a tensor."""
    return value._local_tensor if hasattr(value, "_local_tensor") else value


def expected_whole(key: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The whole tensor of a key: the place of each element, from a start of the key's own. Exact in fp32."""
    numel = torch.Size(shape).numel()
    return (torch.arange(numel) + zlib.crc32(key.encode()) % 3000 * 4096).float().reshape(shape)


def boxes(key: str, value: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(this rank's numbers, what they must be) for each box of the whole tensor that it holds."""
    info = getattr(value, "shard_info", None)
    if info is None:
        yield local(value), expected_whole(key, tuple(value.shape)).to(value.dtype)
        return
    whole = expected_whole(key, info.location.global_shape)
    for chunk in info.chunks():
        mine, theirs = local(value), whole
        for dim, size in enumerate(chunk.sizes):
            mine = mine.narrow(dim, chunk.local_offsets[dim], size)
            theirs = theirs.narrow(dim, chunk.global_offsets[dim], size)
        yield mine, theirs


def fill(ranks: list[PaperRank]) -> None:
    """Give every tensor its numbers."""
    for rank in ranks:
        for key, value in rank.tensors.items():
            for mine, theirs in boxes(key, value):
                mine.copy_(theirs)


def check(ranks: list[PaperRank]) -> None:
    """Every number of every rank is the right one."""
    for number, rank in enumerate(ranks):
        for key, value in rank.tensors.items():
            for mine, theirs in boxes(key, value):
                assert torch.equal(mine, theirs), f"rank {number}: {key}"


def check_file(root: Path, iteration: int, names: dict[str, tuple[int, ...]]) -> None:
    """What lies in the file, read without any layout: all keys, their shapes, every element, and no byte twice."""
    directory = directory_of(root, iteration)
    reader = CheckpointReader(directory)
    assert {key: tuple(entry.size) for key, entry in reader.tensors.items()} == names
    for key, shape in names.items():
        assert torch.equal(reader.tensor(key), expected_whole(key, shape).to(reader.tensor(key).dtype)), key
    for key, entry in reader.tensors.items():
        assert (
            sum(torch.Size(chunk.sizes).numel() for chunk in entry.chunks) == torch.Size(entry.size).numel()
        ), key


def whole_shapes(ranks: list[PaperRank]) -> dict[str, tuple[int, ...]]:
    """{key: shape in the whole model} of one rank that holds all of it."""
    (rank,) = ranks
    shapes = {}
    for key, value in rank.tensors.items():
        info = getattr(value, "shard_info", None)
        shapes[key] = tuple(value.shape) if info is None else tuple(info.location.global_shape)
    assert {key.split(".")[0] + "." for key in shapes} <= {MODEL_PREFIX, BUFFER_PREFIX, OPTIMIZER_PREFIX}
    return shapes
