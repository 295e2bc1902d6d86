"""Module and autograd hooks: they translate what PyTorch runs into calls of the engine.

- before a unit's forward: gather; hook the inputs' gradients (the unit's backward is over when they are all computed).
- after it: release; hook the outputs' gradients (the unit's backward begins with the first).
- after a parameter's gradient accumulated: collect it into the window.

All hooks survive in-place changes of inputs and outputs: tensor hooks stay with the value they were registered on, and
no autograd function is put between modules.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from megatron.fsdp.main_grad import delays_wgrad
from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.precision import MixedPrecisionPolicy, cast_floating
from megatron.fsdp.schedule import Engine
from megatron.fsdp.unit import Invocation, Unit


class UnitHooks:
    """The hooks of one unit. `ensure_engine(unit)` makes the unit's model ready on its first forward."""

    def __init__(
        self,
        unit: Unit,
        policy: MixedPrecisionPolicy,
        ensure_engine: Callable[[Unit], Engine],
        is_root: bool = False,
    ) -> None:
        self.unit = unit
        self.policy = policy
        self.ensure_engine = ensure_engine
        self.is_root = is_root
        self._still_to_run: set[int] = set()
        self._invocations: list[Invocation] = []  # of forwards in progress
        self._handles: dict[nn.Module, list[RemovableHandle]] = {}

    def register(self) -> None:
        """Register the hooks on the unit's modules and parameters."""
        for module in self.unit.modules:
            self.attach(module)
        for managed in self.unit.parameters:
            managed.on_trainable = self.watch_gradient
            if managed.compute.requires_grad:
                self.watch_gradient(managed)
        self._watch_delayed_wgrad()

    def attach(self, module: nn.Module) -> None:
        """Run the hooks around `module`'s forward; around its compiled one, so that they are in no graph."""
        compiled = module._compiled_call_impl
        if compiled is not None:
            module._compiled_call_impl = functools.partial(self._call_compiled, module, compiled)  # type: ignore[assignment]
            return
        self._handles[module] = [
            module.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
            module.register_forward_hook(self.after_forward),
        ]

    def detach(self, module: nn.Module) -> None:
        """Take the hooks off `module`'s forward (it is about to be compiled)."""
        for handle in self._handles.pop(module, []):
            handle.remove()

    def _call_compiled(
        self, module: nn.Module, compiled: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        args, kwargs = self.before_forward(module, args, kwargs)
        return self.after_forward(module, args, compiled(*args, **kwargs))

    def watch_gradient(self, managed: ManagedParameter) -> None:
        """Hook the accumulation of a compute parameter's gradient, once."""
        managed.on_trainable = None
        # Python's cycle collector does not look into this kind of hook: strong references would keep the model alive.
        hook = functools.partial(_gradient_accumulated, weakref.ref(self.unit), weakref.ref(managed))
        managed.compute.register_post_accumulate_grad_hook(hook)

    def _watch_delayed_wgrad(self) -> None:
        by_module: dict[nn.Module, list[ManagedParameter]] = {}
        for managed in self.unit.parameters:
            for module, _ in managed.sites:
                if delays_wgrad(module):
                    managed.main_grad.delaying.append(module)
                    by_module.setdefault(module, []).append(managed)
        for module, parameters in by_module.items():
            hook = functools.partial(self._delayed_wgrad_done, parameters)
            module.register_wgrad_accumulation_and_reduce_hooks(hook)  # type: ignore[operator]
            backward_dw: Callable[..., Any] = module.backward_dw  # type: ignore[assignment]
            run = functools.partial(_with_compute_parameters, backward_dw, module, parameters)
            module.backward_dw = run  # type: ignore[assignment]

    def _delayed_wgrad_done(self, parameters: Sequence[ManagedParameter], *_args: object) -> None:
        assert self.unit.engine is not None
        self.unit.engine.delayed_gradient_ready(self.unit, parameters)

    def before_forward(self, module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        """Gather the unit and cast its inputs."""
        engine = self.ensure_engine(self.unit)
        in_backward = torch._C._current_graph_task_id() != -1
        if self.is_root and not in_backward:
            engine.begin_forward()
        elif not engine.in_forward and not in_backward:
            engine.begin_alone()
        if not self._still_to_run:
            self._still_to_run = {id(each) for each in self.unit.modules}
        engine.enter_forward(self.unit, in_backward)
        if self.policy.cast_forward_inputs and self.policy.param_dtype is not None:
            cast = functools.partial(cast_floating, dtype=self.policy.param_dtype)
            args, kwargs = tree_map(cast, args), tree_map(cast, kwargs)
        invocation = Invocation()
        self._invocations.append(invocation)
        if torch.is_grad_enabled():
            self._hook_inputs([*tensors_of(args), *tensors_of(kwargs)], invocation)
        return args, kwargs

    def after_forward(self, module: nn.Module, _args: tuple, output: Any) -> Any:
        """Release the unit and hook its outputs."""
        engine = self.unit.engine
        assert engine is not None
        in_backward = torch._C._current_graph_task_id() != -1
        if self.policy.output_dtype is not None:
            output = tree_map(functools.partial(cast_floating, dtype=self.policy.output_dtype), output)
        with_graph, invocation = False, self._invocations.pop()
        if torch.is_grad_enabled():
            for tensor in tensors_of(output):
                if tensor.requires_grad:
                    with_graph = True
                    tensor.register_hook(functools.partial(self._output_gradient, invocation))
        self._still_to_run.discard(id(module))
        if not self._still_to_run:
            engine.leave_forward(self.unit, in_backward, with_graph)
        if self.is_root and not in_backward:
            engine.end_forward()
        return output

    def _output_gradient(self, invocation: Invocation, _gradient: Tensor) -> None:
        assert self.unit.engine is not None
        self.unit.engine.enter_backward(self.unit, invocation)

    def _hook_inputs(self, tensors: list[Tensor], invocation: Invocation) -> None:
        for tensor in tensors:
            if tensor.requires_grad:
                invocation.num_inputs += 1
                tensor.register_hook(functools.partial(self._input_gradient, invocation))

    def _input_gradient(self, invocation: Invocation, _gradient: Tensor) -> None:
        invocation.num_inputs -= 1
        if invocation.num_inputs == 0:
            assert self.unit.engine is not None
            self.unit.engine.leave_backward(self.unit, invocation)


def _with_compute_parameters(
    backward_dw: Callable[..., Any], module: nn.Module, parameters: Sequence[ManagedParameter], *args: Any
) -> Any:
    """Run `backward_dw` with the compute parameters on `module`.

    Transformer Engine assigns delayed gradients that are not fused (biases) to the `.grad` of the parameter that the
    module holds when it runs, which after backward is the sharded one.
    """
    registered = dict(module._parameters)
    for managed in parameters:
        for site, attribute in managed.sites:
            if site is module:
                module._parameters[attribute] = managed.compute
    try:
        return backward_dw(*args)
    finally:
        module._parameters.update(registered)


def _gradient_accumulated(
    unit: weakref.ref[Unit], managed: weakref.ref[ManagedParameter], _parameter: Tensor
) -> None:
    owner, parameter = unit(), managed()
    assert owner is not None and owner.engine is not None and parameter is not None
    owner.engine.gradient_ready(owner, parameter)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in a nest of containers and dataclasses."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
        return [tensor for each in value for tensor in tensors_of(each)]
    leaves = tree_flatten(value)[0]
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for leaf in leaves:
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            tensors += tensors_of(leaf)
    return tensors


def wrap_method(hooks: Sequence[UnitHooks], module: nn.Module, name: str) -> None:
    """Make method `name` of `module` gather and release the module's unit as forward does."""
    method = getattr(module, name, None)
    if method is None:
        raise ValueError(f"register_fsdp_forward_method: {type(module).__name__} has no method {name!r}")

    @functools.wraps(method)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        for hook in hooks:
            args, kwargs = hook.before_forward(module, args, kwargs)
        output = method(*args, **kwargs)
        for hook in hooks:
            output = hook.after_forward(module, args, output)
        return output

    setattr(module, name, wrapped)
