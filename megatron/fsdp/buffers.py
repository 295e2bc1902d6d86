"""Where gathered parameters live: allocate-and-free, or a pool.

Note [pool(k)]
By default a group's gathered storage is allocated for a use and freed after it. With `FSDPConfig.buffer_pool=k` the
units that are released between uses take turns on k sets of buffers that are allocated once: unit number i (in
registration order) always uses set i mod k, so that what autograd saved of a weight sees the data of its next gather. A
set has a buffer for each of a unit's groups, as large as the largest of the units that share it, whatever their shapes.
A gather ahead into a set that is in use is left to the use itself. Units that run one after the other need sets of
their own, since backward begins with one before it has left the other: a model whose order of layers changes much has
no use for this. Units that contain others, stay gathered, or are shared by several allocate and free.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.root import unit_of
from megatron.fsdp.unit import Unit


class Slot:
    """One buffer of the pool and the group that has it now."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.holder: ParamGroup | None = None

    def has_room(self, group: ParamGroup) -> bool:
        """Whether `group` may be gathered into it now."""
        return self.holder is None or self.holder is group

    def make_room(self, group: ParamGroup) -> bool:
        """Take the buffer from a group that was gathered ahead and is not in use; return whether there was one.

        Raises:
            RuntimeError: the group that has it is in use.
        """
        if self.has_room(group):
            return False
        holder = self.holder
        assert holder is not None
        if holder.holders:
            raise RuntimeError(
                f"FSDP: {group.name} needs the pool's buffer that {holder.name} is using: their units run at the same "
                f"time, or one after the other. Use a larger buffer_pool, or 0 to allocate and free"
            )
        if holder.gather_pending is not None:
            holder.gather_pending.wait()
            holder.gather_pending = None
        holder.release()
        return True


def make_pool(units: Sequence[Unit], count: int) -> list[Slot]:
    """Put the units that are released between uses on `count` sets of buffers (Note [pool(k)]); return the buffers.

    Raises:
        ValueError: `count` is less than 2: the gather ahead would never find a buffer.
    """
    if count < 2:
        raise ValueError(
            f"buffer_pool={count}: a unit is gathered while another is used; use 2 or more, or 0 to allocate and free"
        )
    turns = [unit for unit in units if _takes_turns(unit)]
    members: dict[tuple[int, int], list[ParamGroup]] = {}
    for number, unit in enumerate(turns):
        for position, group in enumerate(
            group for group in unit.groups if group.placements.parameters_released
        ):
            members.setdefault((number % count, position), []).append(group)
    slots = []
    for groups in members.values():
        slot = Slot(max(group.compute_bytes for group in groups), groups[0].spec.device)
        for group in groups:
            group.move_compute(slot)
        slots.append(slot)
    return slots


def _takes_turns(unit: Unit) -> bool:
    has_units_inside = any(
        unit_of(child) not in (None, unit) for module in unit.modules for child in module.modules()
    )
    return bool(unit.modules) and unit.reshard_after_forward and not has_units_inside
