"""FSDPModule: the methods that fully_shard adds to a module, with the names and meanings of torch's FSDPModule.

Ours is no subclass of torch's: torch.distributed.pipelining reaches into the privates of that. Its pipeline runtime
takes custom functions for UNSHARD, RESHARD and REDUCE_GRAD instead.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn

from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.root import unit_of
from megatron.fsdp.unit import Unit

HOOKS_ATTRIBUTE = "_fsdp_hooks"


@functools.cache
def fsdp_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a wrapped instance of `cls` gets: `FSDPModule` first, then `cls`."""
    members: dict[str, Any] = {"__module__": cls.__module__}
    for base in cls.__mro__[: cls.__mro__.index(nn.Module)]:
        for name, member in vars(base).items():
            if inspect.isfunction(member) and not name.startswith("_") and not hasattr(FSDPModule, name):
                members.setdefault(name, _explained(name, member))
    return type(f"FSDP{cls.__name__}", (FSDPModule, cls), members)


def _explained(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Return `method` of a wrapped module with an error that says so when it meets parameters that are not gathered."""

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(self, *args, **kwargs)
        try:
            return method(self, *args, **kwargs)
        except RuntimeError as error:
            unit = unit_of(self)
            assert unit is not None
            gathered = all(group.uses_compute for group in unit.used_groups)
            if gathered or "mixed torch.Tensor and DTensor" not in str(error):
                raise
            how = (
                "call the module itself, not its forward()"
                if name == "forward"
                else f"call it within forward, or after register_fsdp_forward_method(module, {name!r})"
            )
            raise RuntimeError(
                f"FSDP: {name}() of unit {unit.name} ({type(self).__mro__[2].__name__}) used parameters that are not "
                f"gathered: {how}"
            ) from error

    return run


def units_below(modules: tuple[nn.Module, ...]) -> list[Unit]:
    """Return the units of `modules` and inside them, in registration order, each once."""
    found = {}
    for root in modules:
        for module in root.modules():
            unit = unit_of(module)
            if unit is not None:
                found[unit.id] = unit
    return list(found.values())


class UnshardHandle:
    """Returned by `unshard(async_op=True)`."""

    def __init__(self, unit: Unit) -> None:
        self._unit = unit

    def wait(self) -> None:
        """Wait for the gather; the module then has its whole parameters."""
        _engine_of(self._unit).acquire(self._unit)


class FSDPModule:
    """Mixed into the class of a module by `fully_shard`."""

    def __deepcopy__(self, memo: dict) -> NoReturn:
        raise RuntimeError(
            "FSDP: a wrapped module cannot be copied; copy it before fully_shard, or use state_dict()"
        )

    def _units(self, recurse: bool) -> list[Unit]:
        own = unit_of(self)  # type: ignore[arg-type]
        assert own is not None
        return units_below((self,)) if recurse else [own]  # type: ignore[arg-type]

    # --- gather and release -------------------------------------------------------------------------------

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gather this unit's parameters and put them on the module; with `async_op` at the handle's `wait()`."""
        unit = self._units(False)[0]
        if async_op:
            _engine_of(unit).launch_gather(unit, unit.used_groups)
            return UnshardHandle(unit)
        _engine_of(unit).acquire(unit)
        return None

    def reshard(self) -> None:
        """Release this unit's gathered parameters."""
        unit = self._units(False)[0]
        _engine_of(unit).release(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether parameters are released after forward."""
        _check_bool("reshard_after_forward", reshard_after_forward)
        for unit in self._units(recurse):
            unit.reshard_to = None
            unit.reshard_setting = unit.reshard_after_forward = reshard_after_forward

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether parameters are released after backward."""
        _check_bool("reshard_after_backward", reshard_after_backward)
        for unit in self._units(recurse):
            unit.reshard_after_backward = reshard_after_backward

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules that are gathered when this one's forward begins."""
        self._units(False)[0].forward_prefetch = _units_of(modules)

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Set the modules that are gathered when this one's backward begins."""
        self._units(False)[0].backward_prefetch = _units_of(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether backward gathers this unit's parameters (no, where it does not read them)."""
        self._units(False)[0].backward_needs_parameters = unshard_in_backward

    # --- gradients ----------------------------------------------------------------------------------------

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients; without, they accumulate unreduced."""
        for unit in self._units(recurse):
            unit.requires_sync = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """HSDP: set whether backward reduces over the outer axis too."""
        for unit in self._units(recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is the step's last: False leaves reductions in flight at its end."""
        _engine_of(self._units(False)[0]).wait_at_end_of_backward = is_last_backward

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set what this unit's gradients, summed over the mesh, are divided by."""
        for unit in self._units(False):
            for group in unit.groups:
                group.gradients.divisor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Deprecated name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Nothing to do: reductions always sum; the divisor is applied to the sum."""

    def reset_iter_state(self) -> None:
        """Forget the gradients of a step that failed half-way."""
        for unit in self._units(True):
            for group in unit.groups:
                group.gradients.discard()

    # --- not here, with the reason --------------------------------------------------------------------------

    def set_custom_all_gather(self, comm: object) -> None:
        """Refused: collectives are a table per backend."""
        _refuse(
            "set_custom_all_gather", "collectives are a table per backend in megatron/fsdp/collectives.py"
        )

    def set_custom_reduce_scatter(self, comm: object) -> None:
        """Refused: collectives are a table per backend."""
        _refuse(
            "set_custom_reduce_scatter", "collectives are a table per backend in megatron/fsdp/collectives.py"
        )

    def set_all_reduce_hook(self, hook: Callable[[torch.Tensor], None], *, stream: object = None) -> None:
        """Refused: use a 2-D mesh."""
        _refuse("set_all_reduce_hook", "reduce over a further axis with a 2-D mesh")

    def set_post_optim_event(self, event: object) -> None:
        """Refused: gathers wait for the stream that called forward."""
        _refuse("set_post_optim_event", "gathers wait for everything launched before forward")

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Nothing to do: unused parameters always contribute zeros."""

    def set_order_check(self, interval: int) -> None:
        """Ours: compare the order of launches between ranks every `interval` backwards; 0: never. Of the root."""
        _engine_of(self._units(False)[0]).check_order_every(interval)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Set the number of reductions in flight, of the whole model."""
        if max_input_buffers < 1:
            raise ValueError(f"FSDP: max_input_buffers={max_input_buffers} must be at least 1")
        _engine_of(self._units(False)[0]).reducer.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Nothing to do: where a backend orders operations, gathers and reductions have groups of their own."""

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Refused: registered buffers are not built yet."""
        if enable:
            _refuse("set_allocate_memory_from_process_group_for_comm", "registered buffers are not built yet")

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Refused: symmetric memory is not built yet."""
        _refuse("set_symm_mem_for_comm", "symmetric memory is not built yet")

    # --- nn.Module ------------------------------------------------------------------------------------------

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the forward in place, FSDP's hooks outside of the graph."""
        hooks = self.__dict__[HOOKS_ATTRIBUTE]
        if self.__dict__.get("_compiled_call_impl") is not None:
            raise RuntimeError("FSDP: the module is compiled already")
        hooks.detach(self)
        super().compile(*args, **kwargs)  # type: ignore[misc]
        hooks.attach(self)

    def to_empty(self, *, device: Any, recurse: bool = True) -> Any:
        """Take the (real) parameters as they are for ready to be initialised; make meta buffers real and empty."""
        super().to_empty(device=device, recurse=recurse)  # type: ignore[misc]
        for unit in self._units(recurse):
            for group in unit.groups:
                group.unset = False
        return self

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Apply `fn` (of `to`, `to_empty`, `cuda`...) to buffers and unmanaged parameters only.

        FSDP's parameters are on their device from the start; a change of their device or dtype is an error.
        """
        groups = [group for unit in self._units(True) for group in unit.groups]
        with _parameters_hidden(groups):
            super()._apply(fn, recurse)  # type: ignore[misc]
        for group in groups:
            probe = torch.empty(0, dtype=group.precision.main, device=group.spec.device)
            after = fn(probe)
            if after.dtype != probe.dtype or (after.device != probe.device and after.device.type != "meta"):
                raise ValueError(
                    f"FSDP: parameters are {probe.dtype} on {probe.device}; they cannot become {after.dtype} on "
                    f"{after.device} after wrapping. Convert the module before fully_shard, or use mp_policy"
                )
        return self


class _parameters_hidden:
    """Take FSDP's parameters off their modules for the body."""

    def __init__(self, groups: list[ParamGroup]) -> None:
        self._sites = [
            (module, attribute, module._parameters[attribute])
            for group in groups
            for managed in group.parameters
            for module, attribute in managed.sites
            if attribute in module._parameters
        ]

    def __enter__(self) -> None:
        for module, attribute, _ in self._sites:
            module._parameters[attribute] = None

    def __exit__(self, *_exception: object) -> None:
        for module, attribute, parameter in self._sites:
            module._parameters[attribute] = parameter


def _engine_of(unit: Unit) -> Any:
    if unit.engine is None:
        from megatron.fsdp.api import _ensure_engine

        return _ensure_engine(unit)
    return unit.engine


def _units_of(modules: list[FSDPModule]) -> list[Unit]:
    units = []
    for module in modules:
        unit = unit_of(module)  # type: ignore[arg-type]
        if unit is None:
            raise ValueError(
                f"FSDP: {type(module).__name__} in a prefetch list is not wrapped by fully_shard"
            )
        units.append(unit)
    return units


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ValueError(f"FSDP: {name} must be True or False, got {value!r}")


def _refuse(name: str, reason: str) -> NoReturn:
    raise NotImplementedError(f"FSDPModule.{name} is not supported: {reason}")
