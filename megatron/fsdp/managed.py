"""One weight under FSDP: as the user's module has it, and its compute and sharded parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from megatron.fsdp.main_grad import MainGrad
from megatron.fsdp.shard_info import Location, ShardInfo

if TYPE_CHECKING:
    from megatron.fsdp.param_group import ParamGroup


@dataclass
class ParameterSource:
    """A parameter as the user's module has it, and every (module, attribute) where it is registered."""

    name: str
    parameter: nn.Parameter
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    location: Location | None = None
    overwrite_allowed: bool = True


class ManagedParameter:
    """The two parameters of one weight (compute and sharded), its sites and its gradient."""

    def __init__(self, source: ParameterSource, group: ParamGroup, index: int) -> None:
        self.name = source.name
        self.sites = source.sites
        self.group = group
        self.index = index
        self.compute: nn.Parameter
        self.sharded: nn.Parameter
        self.rows: Tensor  # of the sharded parameter on this rank
        self.info: ShardInfo
        self.main_grad: MainGrad
        self.on_trainable: Callable[[ManagedParameter], None] | None = None

    @property
    def requires_grad(self) -> bool:
        """Whether the sharded parameter asks for a gradient; may change between steps."""
        return self.sharded.requires_grad

    @property
    def writes(self) -> int:
        """Number of writes to the sharded parameter (sharded_parameter.py, Note [Writes])."""
        if self.sharded._local_tensor is not self.rows:  # type: ignore[attr-defined]
            raise RuntimeError(
                f"FSDP: the tensor of parameter {self.name} was replaced after wrapping (by .to() of a module inside "
                f"the wrapped one?); convert the module before wrapping it, use mp_policy, or write to it in place"
            )
        return self.rows._version

    def rename(self, name: str) -> None:
        """Take the name that the parameter has in its root module."""
        if name != self.name and self.info.location.name == self.name:
            location = replace(self.info.location, name=name)
            self.info = replace(self.info, name=name, location=location)
            self.sharded.shard_info = self.info  # type: ignore[attr-defined]
            self.name = self.main_grad.name = name

    def install(self, parameter: nn.Parameter) -> None:
        """Register `parameter` (the compute or the sharded one) at every site."""
        for module, attribute in self.sites:
            if type(module).__setattr__ is nn.Module.__setattr__:
                module._parameters[attribute] = parameter
            else:
                setattr(module, attribute, parameter)
