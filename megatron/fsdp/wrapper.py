"""FullyShardedDataParallel: the DDP-shaped facade that a Megatron training loop calls."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron.fsdp.buffers import make_pool
from megatron.fsdp.grouping import DataParallelPlacement, GroupBuilder, GroupingOptions, Locate, PlacementFor
from megatron.fsdp.hooks import UnitHooks
from megatron.fsdp.managed import ParameterSource
from megatron.fsdp.param_group import Initialize, ParamGroup
from megatron.fsdp.precision import GroupPrecision, MixedPrecisionPolicy
from megatron.fsdp.root import (
    SourceCollector,
    device_of,
    make_engine,
    make_unit,
    move_buffers,
    own_modules,
    unit_of,
)
from megatron.fsdp.schedule import Engine
from megatron.fsdp.strategy import OuterStrategy, ShardingStrategy
from megatron.fsdp.unit import Unit

UnitModules = tuple[type[nn.Module], ...] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class FSDPConfig:
    """Options of `FullyShardedDataParallel`.

    Attributes:
        strategy: sharding over the inner data-parallel axis.
        outer_strategy: over the outer one.
        main_params_dtype: dtype that the optimizer updates; None: each parameter's own.
        main_grads_dtype: dtype that gradients accumulate in.
        grad_comm_dtype: dtype of gradients on the wire; None: `main_grads_dtype`.
        reshard_after_forward: release a unit's parameters after its forward (ZeRO-3).
        reshard_after_backward: and after its backward; False keeps them for the next microbatch.
        defer_communication: under `no_sync`, accumulate whole gradients and reduce once a step, also where the
            strategy shards gradients.
        prefetch: units gathered ahead.
        max_reductions: reductions in flight.
        buffer_pool: number of sets of buffers that gathered units take turns on; 0: allocate and free (buffers.py).
        order_check_interval: steps after which the order of launches is compared between ranks; 0: never (order.py).
        tensor_atomic: never cut a parameter (for optimizers that need whole matrices, such as Muon).
    """

    strategy: ShardingStrategy = ShardingStrategy.OPTIM_GRADS_PARAMS
    outer_strategy: OuterStrategy = OuterStrategy.NO_SHARD
    main_params_dtype: torch.dtype | None = torch.float32
    main_grads_dtype: torch.dtype = torch.float32
    grad_comm_dtype: torch.dtype | None = None
    reshard_after_forward: bool = True
    reshard_after_backward: bool = True
    defer_communication: bool = False
    prefetch: int = 1
    max_reductions: int = 2
    buffer_pool: int = 0
    order_check_interval: int = 0
    tensor_atomic: bool = False

    def precision_of(self, _name: str, parameter: nn.Parameter) -> GroupPrecision:
        """Return the dtypes of `parameter`, which computes in the dtype that it was built with."""
        return GroupPrecision(
            main=self.main_params_dtype or parameter.dtype,
            compute=parameter.dtype,
            grad=self.main_grads_dtype,
            wire=self.grad_comm_dtype or self.main_grads_dtype,
        )


class FullyShardedDataParallel(nn.Module):
    """Wrap `module` so that its parameters, gradients and optimizer state are sharded as `config` says.

    `parameters()` are DTensors in the main dtype whose `.grad` is the reduced gradient after `finish_grad_sync()`;
    names are the module's own. Every unit's parameters are gathered for its forward and backward only.

    Args:
        module: on any device, or on meta with `initialize`.
        config: options.
        placement_for: `(name, parameter) -> DataParallelPlacement`.
        unit_modules: types of the modules that are units of their own, or a predicate `(name, module) -> bool`;
            the rest is one more unit.
        initialize: `(name, parameter, rows, out)` fills `out` with rows `rows` of a parameter on meta.
        locate: `(name, parameter) -> Location` of a parameter in the whole model (tensor, expert and pipeline axes).

    Raises:
        ValueError: module wrapped twice, parameters on meta without `initialize`.
        RuntimeError: on all ranks, if they wrapped different models.
    """

    def __init__(
        self,
        module: nn.Module,
        config: FSDPConfig,
        placement_for: PlacementFor,
        unit_modules: UnitModules,
        initialize: Initialize | None = None,
        locate: Locate | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.module = module
        first = next(iter(module.named_parameters()), None)
        if first is None:
            raise ValueError("FullyShardedDataParallel: the module has no parameters")
        device = device_of(placement_for(*first).shard_mesh)
        options = GroupingOptions(
            config.strategy, config.outer_strategy, config.precision_of, placement_for, locate,
            config.tensor_atomic, device,
        )  # fmt: skip
        units = self._make_units(unit_modules, GroupBuilder(options), initialize)
        move_buffers(module, device)
        self.engine: Engine = make_engine(module, units, config.prefetch, config.max_reductions)
        self.engine.wait_at_end_of_backward = False
        if config.buffer_pool:
            make_pool(units, config.buffer_pool)
        self.engine.check_order_every(config.order_check_interval)
        self._register_hooks(units)

    def _make_units(
        self, unit_modules: UnitModules, builder: GroupBuilder, initialize: Initialize | None
    ) -> list[Unit]:
        types = unit_modules
        is_unit = (lambda _name, child: isinstance(child, types)) if isinstance(types, tuple) else types
        named = [(name, child) for name, child in self.module.named_modules() if is_unit(name, child)]
        named = [("", self.module)] + [(name, child) for name, child in named if child is not self.module]
        roots = [child for _, child in named]
        if any(unit_of(child) is not None for child in roots):
            raise ValueError(
                "FullyShardedDataParallel: the module, or one in it, is wrapped already; wrap it once"
            )
        collected = [SourceCollector().collect(own_modules(child, name, roots))[0] for name, child in named]
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        for source in (source for sources in collected for source in sources):
            source.name = names[id(source.parameter)]  # of a tied weight: the first in registration order
        shared, owned = _split_shared(collected)
        units = [
            self._make_unit(name or "root", (child,), sources, builder, initialize)
            for (name, child), sources in zip(named, owned, strict=True)
        ]
        if shared:
            holder = self._make_unit("shared parameters", (), shared, builder, initialize)
            owner = {id(source.parameter): source.parameter._fsdp_managed.group for source in shared}  # type: ignore[attr-defined]
            for unit, sources in zip(units, collected, strict=True):
                used = [owner[id(source.parameter)] for source in sources if id(source.parameter) in owner]
                unit.borrowed = list(dict.fromkeys(used))
            units.insert(0, holder)
        return units

    def _make_unit(
        self,
        name: str,
        modules: tuple[nn.Module, ...],
        sources: list[ParameterSource],
        builder: GroupBuilder,
        initialize: Initialize | None,
    ) -> Unit:
        meta = [source.name for source in sources if source.parameter.is_meta]
        if meta and initialize is None:
            raise ValueError(
                f"parameter {meta[0]} is on the meta device; pass initialize= to draw its values"
            )
        unit = make_unit(name, modules, sources, builder)
        unit.reshard_after_forward = self.config.reshard_after_forward and name != "root"
        unit.reshard_after_backward = self.config.reshard_after_backward
        if meta and initialize is not None:
            for group in unit.groups:
                group.materialise(initialize)
        return unit

    def _register_hooks(self, units: list[Unit]) -> None:
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for unit in units:
            is_root = unit.modules == (self.module,)
            UnitHooks(unit, policy, lambda _unit: self.engine, is_root).register()

    # --- what a training loop calls -------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward."""
        return self.module(*args, **kwargs)

    @property
    def groups(self) -> list[ParamGroup]:
        """All parameter groups."""
        return [group for unit in self.engine.units for group in unit.groups]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within it, backward belongs to a microbatch that is not the step's last (of this module)."""
        engine = self.engine
        before = engine.reduce_now, engine.last_microbatch
        engine.reduce_now, engine.last_microbatch = not self.config.defer_communication, False
        try:
            yield
        finally:
            engine.reduce_now, engine.last_microbatch = before

    def start_grad_sync(self, *_unused: object) -> None:
        """Start the reduction of whatever was accumulated and not reduced yet."""
        self.engine.reduce_all()

    def finish_grad_sync(self) -> None:
        """Return when `.grad` of every parameter is the reduced gradient of the step so far."""
        self.engine.reduce_all()
        self.engine.finish_reductions()

    def start_param_sync(self, *_unused: object, **_options: object) -> None:
        """Start the gathers that are due after an optimizer step, ahead of the next forward."""
        self.engine.streams.begin_step()
        self.engine.gather_ahead()

    def zero_grad_buffer(self) -> None:
        """Forget all gradients."""
        for group in self.groups:
            group.gradients.discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, as `zero_grad_buffer`."""
        self.zero_grad_buffer()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every reduced gradient by `factor`."""
        with torch.no_grad():
            for group in self.groups:
                group.gradients.scale(factor)

    def broadcast_params(self) -> None:
        """Make replicas of main parameters equal to those of their first rank."""
        with torch.no_grad():
            for group in self.groups:
                outer, inner = group.comms.outer_gather, group.comms.gather
                if outer.size > 1 and not group.placements.outer_sharded:
                    dist.broadcast(group.main, group=outer.group, group_src=0)
                if inner.size > 1 and not group.placements.optimizer_sharded:
                    dist.broadcast(group.main, group=inner.group, group_src=0)
                group.mark_stale()

    # --- names and state are the module's own ---------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, sharded parameter); names as before wrapping."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the module's state: sharded parameters (DTensors that know their offsets) and buffers."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load a state of sharded parameters or of whole tensors (each rank takes its rows); `assign` copies too."""
        result = self.module.load_state_dict(state_dict, strict, assign)
        for group in self.groups:
            group.mark_stale()
        return result


def _split_shared(
    collected: list[list[ParameterSource]],
) -> tuple[list[ParameterSource], list[list[ParameterSource]]]:
    """Split the sources of units into (used by several units, owned by one)."""
    uses: dict[int, list[ParameterSource]] = {}
    for sources in collected:
        for source in sources:
            uses.setdefault(id(source.parameter), []).append(source)
    shared = []
    for members in uses.values():
        if len(members) > 1:
            sites = [site for source in members for site in source.sites]
            shared.append(ParameterSource(members[0].name, members[0].parameter, sites))
    owned = [[source for source in sources if len(uses[id(source.parameter)]) == 1] for sources in collected]
    return shared, owned


def data_parallel_placement(mesh: Any) -> PlacementFor:
    """Return a `placement_for` that puts every parameter on one mesh: 1-D (shard) or 2-D (outer, shard)."""
    if mesh.ndim == 1:
        placement = DataParallelPlacement(mesh, None, float(mesh.size()))
    else:
        outer, inner = mesh.mesh_dim_names
        placement = DataParallelPlacement(mesh[inner], mesh[outer], float(mesh.size()))
    return lambda _name, _parameter: placement
