"""Which layers each pipeline stage holds. PURE.

Note "By rule": the embedding and the loss may count as a layer each. What remains after dividing evenly goes, one layer
each, to the stages before the last, from the last but one backwards: the last stage has the loss to compute, the first
ones hold the most activations.

Note "By layout": `E` embedding, `t` layer, `m` multi-token prediction layer, `L` loss; `|` ends a stage, `x*3` repeats
a letter, `(tt|)*3` a group, commas are spaces. Stage s is chunk s // ranks of rank s % ranks, as everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.parallel.pipeline.actions import PipelineShape


@dataclass(frozen=True)
class StageLayers:
    """What one stage is made of.

    Attributes:
        layers: global indices, from 0.
        embedding, loss: whether it holds the embedding, the final norm with head and loss.
        num_mtp: multi-token prediction layers.
    """

    layers: range
    embedding: bool = False
    loss: bool = False
    num_mtp: int = 0

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not (self.layers or self.embedding or self.loss or self.num_mtp)

    def __str__(self) -> str:
        parts = ["embedding"] if self.embedding else []
        if self.layers:
            last = f"-{self.layers[-1]}" if len(self.layers) > 1 else ""
            parts.append(f"layers {self.layers[0]}{last}" if last else f"layer {self.layers[0]}")
        parts += [f"{self.num_mtp} MTP"] if self.num_mtp else []
        return ", ".join([*parts, "loss"] if self.loss else parts) or "nothing"


@dataclass(frozen=True)
class StageRequest:
    """How layers are to be spread.

    Attributes:
        num_layers: of the model.
        count_embedding, count_loss: the embedding, the loss count as a layer.
        first_rank, last_rank: layers on the first and on the last rank, over all their chunks; None: by rule.
        layout: note "By layout"; then the rest must be at its default.
    """

    num_layers: int
    count_embedding: bool = False
    count_loss: bool = False
    first_rank: int | None = None
    last_rank: int | None = None
    layout: str | None = None


def place_layers(request: StageRequest, num_ranks: int, num_chunks: int = 1) -> tuple[StageLayers, ...]:
    """What each of the num_ranks * num_chunks stages holds; every layer is on exactly one.

    Raises ValueError, naming the flags, for layers that do not fit and for a stage without anything to do.
    """
    if request.layout is not None:
        stages = parse_layout(request.layout, request.num_layers)
        if len(stages) != num_ranks * num_chunks:
            raise ValueError(
                f"--pipeline-model-parallel-layout has {len(stages)} stages for {num_ranks} ranks x {num_chunks} "
                f"chunks: give a multiple of --pipeline-model-parallel-size {num_ranks}"
            )
    else:
        stages = _by_rule(request, num_ranks, num_chunks)
    placed = [layer for stage in stages for layer in stage.layers]
    assert placed == list(range(request.num_layers)), (placed, request)
    empty = [index for index, stage in enumerate(stages) if stage.is_empty]
    if empty:
        raise ValueError(
            f"pipeline stage {empty[0]} of {len(stages)} has nothing to do (--num-layers {request.num_layers}, "
            f"--pipeline-model-parallel-size {num_ranks}, {num_chunks} virtual stages on each rank): use fewer "
            "stages or more layers"
        )
    return stages


def _by_rule(request: StageRequest, num_ranks: int, num_chunks: int) -> tuple[StageLayers, ...]:
    num_stages = num_ranks * num_chunks
    fixed: dict[int, int] = {}
    for flag, rank, count in (
        ("--decoder-first-pipeline-num-layers", 0, request.first_rank),
        ("--decoder-last-pipeline-num-layers", num_ranks - 1, request.last_rank),
    ):
        if count is None:
            continue
        counted = (
            count + (request.count_embedding and rank == 0) + (request.count_loss and rank == num_ranks - 1)
        )
        if num_ranks == 1 or count < 0 or counted % num_chunks:
            raise ValueError(
                f"{flag} {count}: give a multiple of the {num_chunks} virtual stages, for 2 or more pipeline ranks"
            )
        shares = dict.fromkeys(range(rank, num_stages, num_ranks), counted // num_chunks)
        fixed |= shares
    units = request.num_layers + request.count_embedding + request.count_loss
    free = [stage for stage in range(num_stages) if stage not in fixed]
    rest = units - sum(fixed.values())
    if rest < 0 or (not free and rest):
        raise ValueError(
            f"--num-layers {request.num_layers} does not fit --decoder-first-pipeline-num-layers {request.first_rank} "
            f"and --decoder-last-pipeline-num-layers {request.last_rank} on {num_ranks} pipeline ranks"
        )
    counts = dict(fixed)
    if free:
        each, more = divmod(rest, len(free))
        counts |= dict.fromkeys(free, each)
        for stage in free[-1 - more : -1]:
            counts[stage] += 1
    return _stages_of(request, [counts[stage] for stage in range(num_stages)])


def _stages_of(request: StageRequest, counts: Sequence[int]) -> tuple[StageLayers, ...]:
    """From units per stage (layers, and the embedding and the loss where they count) to the layers themselves."""
    last, stages, start = len(counts) - 1, [], 0
    for index, units in enumerate(counts):
        layers = units - (request.count_embedding and index == 0) - (request.count_loss and index == last)
        if layers < 0:
            raise ValueError(
                f"--num-layers {request.num_layers} is too few for {len(counts)} pipeline stages with "
                "--account-for-embedding-in-pipeline-split or --account-for-loss-in-pipeline-split: use fewer stages"
            )
        stages.append(StageLayers(range(start, start + layers), index == 0, index == last))
        start += layers
    return tuple(stages)


def parse_layout(layout: str, num_layers: int) -> tuple[StageLayers, ...]:
    """The stages that a layout describes (note "By layout").

    Raises ValueError for a letter that means nothing, a wrong number of layers, an embedding or a loss that is missing,
    twice, or out of order.
    """
    flag = f"--pipeline-model-parallel-layout {layout}"
    text = layout.replace(",", "").replace(" ", "")
    repeated = re.compile(r"\(([^()]*)\)(?:\*(\d+))?|([Etm|L])\*(\d+)")
    while repeated.search(text):
        text = repeated.sub(lambda m: (m[1] if m[3] is None else m[3]) * int(m[2] or m[4] or 1), text)
    unknown = sorted(set(text) - set("EtmL|"))
    if unknown:
        raise ValueError(f"{flag}: {unknown[0]!r} means nothing; use E, t, m, L, |, (...)*n and x*n")
    stages: list[StageLayers] = []
    start = 0
    for part in text.split("|"):
        if not re.fullmatch("E?t*m*L?", part):
            raise ValueError(f"{flag}: stage {len(stages)} is {part!r}; the order is E, t, m, L")
        count = part.count("t")
        stages.append(StageLayers(range(start, start + count), "E" in part, "L" in part, part.count("m")))
        start += count
    if start != num_layers:
        raise ValueError(f"{flag} has {start} layers, --num-layers is {num_layers}: make them equal")
    if text.count("E") != 1 or text.count("L") != 1 or not stages[0].embedding or not stages[-1].loss:
        raise ValueError(f"{flag}: give one E, in the first stage, and one L, in the last")
    return tuple(stages)


def prediction_stage(stages: Sequence[StageLayers]) -> int:
    """The stage of multi-token prediction: what the layout says, else the one with the loss."""
    return next((index for index, stage in enumerate(stages) if stage.num_mtp), len(stages) - 1)


def describe_stages(stages: Sequence[StageLayers], shape: PipelineShape) -> list[str]:
    """One line for each rank: what its stages hold."""
    return [
        f"rank {rank}: " + "; ".join(f"stage {stage}: {stages[stage]}" for stage in shape.stages_of(rank))
        for rank in range(shape.num_ranks)
    ]
