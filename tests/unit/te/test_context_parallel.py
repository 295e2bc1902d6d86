"""What Transformer Engine is told of context parallelism, as a recorder sees it: groups, ranks, stream and type."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.te.engine import load, run_te_ranks
from tests.unit.te.test_gpt import MODELS

KINDS = ("p2p", "a2a", "all_gather", "a2a+p2p")
STREAM = "the stream of all layers' rings"
Told = tuple[list[list[int]], list[int], str, str]


def told(rank: int, world: int, context: int, kinds: tuple[str, ...]) -> list[Told]:
    """(ranks of each group, all ranks, stream, type) that each layer's core attention got, by layer."""
    from megatron.models.backends.base import LayerOptions
    from megatron.models.backends.transformer_engine import TransformerEngineBackend
    from megatron.models.backends.transformer_engine.attention import ContextParallel
    from megatron.models.config import ModelConfig
    from megatron.models.gpt import GPTModel
    from megatron.parallel.mesh import ParallelMesh, ParallelSizes

    seen: list[Told] = []
    core = load().DotProductAttention

    class Recorder(core):
        def set_context_parallel_group(self, groups: Any, ranks: Any, stream: Any, kind: str = "p2p") -> None:
            listed = groups if isinstance(groups, list) else [groups]
            seen.append(([dist.get_process_group_ranks(group) for group in listed], ranks, stream, kind))
            super().set_context_parallel_group(groups, ranks, stream, kind)

    class OnCpu(TransformerEngineBackend):
        """Without the question for a CUDA device."""

        def _context_parallel(self, group: Any, comm_type: str) -> ContextParallel | None:
            return None if group is None else ContextParallel(group, comm_type, STREAM)

    mesh = ParallelMesh(ParallelSizes(context=context, tensor=world // context))
    shape = {**MODELS["gpt2"], "num_layers": len(kinds), "cp_comm_type": kinds}
    config = ModelConfig(**shape, hierarchical_context_parallel_sizes=(2, 2) if context == 4 else None)
    backend = OnCpu(LayerOptions.from_mesh(mesh, device="meta"))
    backend._te = type("te", (), {**vars(backend._te), "DotProductAttention": Recorder})
    GPTModel(config, backend, mesh)
    return seen


def test_every_layer_is_told_its_groups() -> None:
    """One group for a ring, an all-to-all or gathers; for a2a+p2p the neighbours, then those they are alike with."""
    for rank, layers in enumerate(run_te_ranks(told, 4, 4, KINDS)):
        assert [layer[3] for layer in layers] == list(KINDS)
        assert all(layer[1:3] == ([0, 1, 2, 3], STREAM) for layer in layers)
        assert all(layer[0] == [[0, 1, 2, 3]] for layer in layers[:3])
        neighbours, alike = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]
        assert layers[3][0] == [neighbours, alike]


def test_tensor_parallel_ranks_are_not_context_parallel_ones() -> None:
    for rank, layers in enumerate(run_te_ranks(told, 4, 2, KINDS[:3])):
        own = [rank % 2, rank % 2 + 2]
        assert layers == [([own], own, STREAM, kind) for kind in KINDS[:3]]
