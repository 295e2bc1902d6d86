"""A unit: the modules and parameter groups that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING

from torch import nn

from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.param_group import ParamGroup

if TYPE_CHECKING:
    from megatron.fsdp.schedule import Engine

_IDS = count()


class Phase(Enum):
    """Where a unit is: not in use, in its forward, or held for its backward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


class Invocation:
    """One forward of a unit that left a graph: its backward runs from its outputs' to its inputs' gradients."""

    __slots__ = ("num_inputs",)

    def __init__(self) -> None:
        self.num_inputs = 0  # inputs whose gradients are still to come


class Unit:
    """One FSDP unit.

    Args:
        name: for messages and profiles.
        modules: whose forwards gather the unit; empty for parameters shared by several units.
        groups: parameter groups that the unit owns (reduces).
    """

    def __init__(self, name: str, modules: tuple[nn.Module, ...], groups: list[ParamGroup]) -> None:
        self.id = next(_IDS)
        self.name = name
        self.modules = modules
        self.groups = groups
        self.borrowed: list[ParamGroup] = []  # groups of other units with weights that this one uses too
        self.engine: Engine | None = None
        self.parent: Unit | None = None  # the unit around this one, where fully_shard made it
        self.phase = Phase.IDLE
        self.reshard_after_forward = True
        self.reshard_to: int | None = None  # ranks among which parameters stay after forward; None: released
        self.reshard_setting: bool | int | None = True  # as the user gave it; None: all but the root
        self.requires_sync = True  # reduce gradients in backward
        self.requires_all_reduce = True  # and over the outer axis
        self.reshard_after_backward = True
        self.backward_needs_parameters = any(_backward_needs_parameters(module) for module in modules)
        self.forward_prefetch: list[Unit] | None = None
        self.backward_prefetch: list[Unit] | None = None
        self.in_forward = False  # a forward outside of backward is under way
        self.calls = 0  # forwards in the current root forward
        self.called_twice = False  # ever, within one root forward
        self.fired: set[int] = set()  # ids of parameters whose autograd gradient is final in this pass
        self.in_backward: set[Invocation] = set()  # invocations whose backward has begun and not ended
        self.backward_over = False  # in this pass: no use to gather it ahead again
        self.wait_for_end = False  # fired in an inner graph task, and more may follow in this pass
        self.wanted = 0  # number of parameters that will fire in this pass

    @property
    def used_groups(self) -> list[ParamGroup]:
        """Groups that must be gathered for this unit's forward."""
        return self.groups + self.borrowed

    @property
    def parameters(self) -> Iterable[ManagedParameter]:
        """Parameters that the unit owns."""
        return (managed for group in self.groups for managed in group.parameters)

    @property
    def requires_grad(self) -> bool:
        """Whether any owned parameter asks for a gradient."""
        return any(group.requires_grad for group in self.groups)

    def trainable(self) -> int:
        """Number of owned parameters that ask for a gradient."""
        return sum(managed.requires_grad for managed in self.parameters)

    def pending_writes(self) -> int:
        """Number of delayed wgrads that have not run."""
        return sum(group.gradients.pending_writes() for group in self.groups)


def _backward_needs_parameters(module: nn.Module) -> bool:
    """Whether backward reads parameter values: an embedding's does not.

    A foreign module says so with an attribute `fsdp_backward_needs_parameters = False`.
    """
    for child in module.modules():
        if any(True for _ in child.parameters(recurse=False)):
            default = not isinstance(child, nn.Embedding)
            if getattr(child, "fsdp_backward_needs_parameters", default):
                return True
    return False


def labels(groups: Iterable[ParamGroup]) -> str:
    """Several groups in words."""
    return "; ".join(group.label for group in groups)
