"""Who writes what: plans of a save, made once and reused while nothing changes.

Note "Reused plans". A rank's own plan is a list of boxes from the layout's arithmetic, made anew for every save without
any communication, and compared with that of the last save entry by entry: keys, offsets, sizes, dtypes. Where all are
equal the rank says so instead of sending it; where no rank has anything new, the first one answers the same. Any
difference on any rank makes all plans anew. torch's own cache is one per process and class, compares no dtypes, and
outlives a change of groups; this one belongs to one `Saver`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan


def local_plan(tensors: Mapping[str, Any]) -> SavePlan:
    """What this rank holds of `tensors`, as write items; parts that other ranks hold too are among them."""
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(tensors), is_coordinator=False)
    return planner.create_local_plan()


def merge_plans(plans: Sequence[SavePlan]) -> tuple[list[SavePlan], Metadata]:
    """Share out what several ranks hold, and describe the whole.

    Args:
        plans: of every rank.

    Returns: (each rank's final plan, metadata of the checkpoint).

    Raises ValueError: parts of a tensor overlap or leave holes.
    """
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    finals, metadata = planner.create_global_plan(list(plans))
    finals = FileSystemWriter("unused").prepare_global_plan(finals)
    # torch's own tools (dcp_to_torch_save) rebuild nested dicts by it.
    keys = {name: (name,) for name in metadata.state_dict_metadata}
    return finals, replace(metadata, planner_data=keys)


class PlanCache:
    """The plans of the last save (note "Reused plans"). `reused` counts saves that made none."""

    def __init__(self) -> None:
        self.reused = 0
        self._local: SavePlan | None = None
        self._final: SavePlan | None = None
        self._everyone: list[SavePlan] = []
        self._metadata: Metadata | None = None

    def offer(self, plan: SavePlan) -> SavePlan | None:
        """What to send to the first rank: the plan, or None where it is that of the last save."""
        return None if self._local is not None and self._local.items == plan.items else plan

    def decide(self, offers: Sequence[SavePlan | None]) -> Sequence[SavePlan | None]:
        """On the first rank: every rank's final plan; None where it is that of the last save."""
        if all(offer is None for offer in offers):
            return [None] * len(offers)
        everyone = [self._everyone[rank] if new is None else new for rank, new in enumerate(offers)]
        finals, self._metadata = merge_plans(everyone)
        self._everyone = everyone
        return finals

    def accept(self, local: SavePlan, answer: SavePlan | None) -> SavePlan:
        """Remember the plans of a save; returns this rank's final one."""
        self.reused += answer is None
        self._local, self._final = local, answer or self._final
        assert self._final is not None, "the first save was told to reuse a plan"
        return self._final

    def metadata(self) -> Metadata:
        """On the first rank: what describes the whole; a copy, writers fill it in."""
        assert self._metadata is not None
        return replace(self._metadata)
