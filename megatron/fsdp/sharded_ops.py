"""What tensor operations do on sharded tensors, whose shards are not the even chunks that DTensor assumes.

- Pointwise ones, copies and fillers, and optimizers' lists of these, run on this rank's rows: no communication, and
  less work than DTensor's own dispatch. What meets the rows and is cut otherwise is made whole first.
- Sums, means, norms, minima and maxima over the rows add up however rows are cut: partial results, as of any DTensor.
- All others run on the whole, gathered (collective, as what DTensor redistributes), unless the chunks are even. Views
  that are made so can be read but not written; in-place operations of this kind are refused.

The rule for an operation is the same on all ranks.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from megatron.fsdp.shard_info import gather_full

if TYPE_CHECKING:
    from megatron.fsdp.sharded_parameter import ShardedTensor

aten = torch.ops.aten
_ROWS = frozenset(
    "detach alias clone _to_copy copy_ fill_ zero_ zeros_like ones_like empty_like full_like masked_fill masked_fill_ "
    "is_same_size".split()
)
_LISTS = ("_foreach_", "_fused_")
_NOT_ROWS = frozenset(("equal", "_foreach_norm", "_foreach_max"))
_REDUCTIONS = frozenset(("sum", "mean", "linalg_vector_norm", "_foreach_norm", "amax", "amin", "max", "min"))
_DRAWN = ("_amp_foreach_non_finite_check_and_unscale_",)
_SAME_SHAPE = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_LIKE = {
    aten.new_empty.default: aten.empty_like.default,
    aten.new_zeros.default: aten.zeros_like.default,
    aten.new_ones.default: aten.ones_like.default,
    aten.new_full.default: aten.full_like.default,
}


class Rule(enum.Enum):
    """How an operation runs."""

    ROWS = enum.auto()
    LISTS = enum.auto()
    REDUCTION = enum.auto()
    DTENSOR = enum.auto()
    WHOLE = enum.auto()


class GatheredView(DTensor):
    """A view of a sharded tensor that had to be gathered for it: writes to it would be lost, so they are refused."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func._schema.is_mutable and any(type(each) is cls for each in _written(func, args, kwargs)):
            raise NotImplementedError(
                f"{func} on a view of a sharded parameter or of what was made of it: its rows are spread unevenly, so "
                f"the view is a copy and the write would be lost; write to the tensor itself, or to its to_local()"
            )
        plain = functools.partial(
            _replace, cls, lambda each: DTensor(each._local_tensor, each._spec, requires_grad=False)
        )
        return func(*plain(args), **{name: plain(value) for name, value in kwargs.items()})


def dispatch(cls: type[ShardedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run `func` as its rule says; some of its arguments are of `cls`."""
    if func in _LIKE and tuple(args[1]) == tuple(args[0].shape):
        func, args = _LIKE[func], (args[0], *args[2:])
    elif func in _SAME_SHAPE and isinstance(args[0], cls) and tuple(args[1]) == tuple(args[0].shape):
        return args[0].like(args[0]._local_tensor)
    rule = _rule(func)
    if rule is Rule.ROWS:
        source = _source_of(cls, func, args, kwargs)
        if source is not None:
            return _run_on_rows(cls, func, source, args, kwargs)
    elif rule is Rule.LISTS:
        return _run_on_lists(cls, func, args, kwargs)
    elif rule is Rule.REDUCTION and _reduces_rows(func, args, kwargs):
        return _reduce(cls, func, args, kwargs)
    return _run_on_dtensors(cls, func, args, kwargs, gather=rule is not Rule.DTENSOR)


@functools.cache
def _rule(func: Any) -> Rule:
    name = _name(func)
    if name in _REDUCTIONS and (name not in ("max", "min") or func._overloadname == "default"):
        return Rule.REDUCTION
    if name in _DRAWN or torch.Tag.nondeterministic_seeded in func.tags:
        return Rule.DTENSOR
    if name.startswith(_LISTS) and name not in _NOT_ROWS:
        return Rule.LISTS
    if name in _ROWS or (torch.Tag.pointwise in func.tags and name not in _NOT_ROWS):
        return Rule.ROWS
    return Rule.WHOLE


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors that `func` writes to, in lists too."""
    found: list[Any] = []
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            found += value if isinstance(value, (list, tuple)) else [value]
    return found


def _replace(cls: type, change: Any, value: Any) -> Any:
    """`value` with `change` applied to what is of `cls`, also in sequences."""
    if isinstance(value, cls):
        return change(value)
    if isinstance(value, (list, tuple)):
        return [_replace(cls, change, each) for each in value]
    return value


def _plain(value: DTensor, local: Tensor | None = None) -> DTensor:
    """A plain DTensor of `value`'s local part, or of `local` in its place."""
    # Without __init__, which does nothing but check whether a compiler looks.
    return DTensor.__new__(
        DTensor, value._local_tensor if local is None else local, value._spec, requires_grad=False
    )


def _count_writes(tensors: Sequence[Any]) -> None:
    """Count writes below autograd in the rows' own version counters (param_group.py, Note [Gather is due])."""
    rows = [each._local_tensor for each in tensors if hasattr(each, "shard_info")]
    torch.autograd.graph.increment_version([each for each in rows if not each.is_inference()])


# --- on rows ------------------------------------------------------------------------------------------------


def _source_of(
    cls: type[ShardedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ShardedTensor | None:
    """The argument whose rows the result has; None where there is none, or a plain tensor is not one number."""
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    shape = tensors[0].shape
    if any(each.ndim and each.shape != shape for each in tensors):
        shape = torch.broadcast_shapes(*(each.shape for each in tensors))
    if any(each.ndim and not isinstance(each, DTensor) for each in tensors):
        return None
    if func._schema.is_mutable:
        tensors = _written(func, args, kwargs)
    return next((each for each in tensors if isinstance(each, cls) and each.shape == shape), None)


def _run_on_rows(
    cls: type[ShardedTensor], func: Any, source: ShardedTensor, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    result = func(
        *[_rows(cls, each, source) if isinstance(each, Tensor) else each for each in args],
        **{
            name: _rows(cls, each, source) if isinstance(each, Tensor) else each
            for name, each in kwargs.items()
        },
    )
    if func._schema.is_mutable:
        _count_writes([source])
        return source
    if func is aten.detach.default:
        return source.like(source._local_tensor)  # one counter of writes
    if isinstance(result, (list, tuple)):
        return tuple(source.like(each) for each in result)
    return source.like(result) if isinstance(result, Tensor) else result


def _rows(cls: type[ShardedTensor], value: Tensor, source: ShardedTensor) -> Tensor:
    """What of `value` meets the rows of `source` in a pointwise operation."""
    if value is source:
        return source._local_tensor
    if isinstance(value, cls):
        if value.shard_info is source.shard_info:
            return value._local_tensor
        if value.shard_info.is_cut_as(source.shard_info):
            value.shard_info = source.shard_info  # found the same only once
            return value._local_tensor
    if not isinstance(value, DTensor):
        return value
    whole, shape = _whole(value), source.shape
    if whole.ndim and whole.ndim == len(shape) and whole.shape[0] == shape[0]:
        return whole[source.shard_info.row_slice()]
    return whole


def _whole(value: DTensor) -> Tensor:
    """All of `value`; collective unless it is replicated."""
    if hasattr(value, "shard_info"):
        return gather_full(value._local_tensor, value.shard_info, value.device_mesh)
    if not all(placement.is_replicate() for placement in value.placements):
        value = value.redistribute(placements=[Replicate()] * value.device_mesh.ndim)
    return value._local_tensor


def _run_on_lists(cls: type[ShardedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = args[0]
    sources = first if all(type(each) is cls for each in first) else _sources(cls, args)
    alike = sources is first

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], Tensor):
            return _whole(value) if isinstance(value, DTensor) else value
        if len(value) != len(first):
            return list(value)
        if alike and (value is first or all(map(_cut_as, value, first))):
            return [each._local_tensor for each in value]
        rows = [
            _local(each) if source is None else _rows(cls, each, source)
            for each, source in zip(value, sources, strict=True)
        ]
        _check_written(func, value, rows, _written(func, args, kwargs))
        return rows

    result = func(*map(local, args), **{name: local(value) for name, value in kwargs.items()})
    if func._schema.is_mutable:
        _count_writes(_written(func, args, kwargs))
        return None if result is None else first
    return [
        _wrap_as(first[index], each) if source is None else source.like(each)
        for index, (each, source) in enumerate(zip(result, sources, strict=True))
    ]


def _check_written(
    func: Any, tensors: Sequence[Tensor], rows: Sequence[Tensor], written: Sequence[Any]
) -> None:
    """Refuse to write to the rows of `tensors` that are copies: the tensors are not cut as what they go with."""
    ids = {id(each) for each in written}
    for tensor, own in zip(tensors, rows, strict=True):
        if id(tensor) in ids and _local(tensor) is not own:
            raise NotImplementedError(
                f"{func} writes to a DTensor of shape {tuple(tensor.shape)} that is not cut as the sharded parameter "
                f"it goes with; make it from the parameter, for example with zeros_like()"
            )


def _cut_as(value: Any, source: Any) -> bool:
    """Whether both are sharded tensors of one layout, as far as can be seen at a glance."""
    return type(value) is type(source) and value.shard_info is source.shard_info


def _sources(cls: type[ShardedTensor], args: Sequence[Any]) -> list[ShardedTensor | None]:
    """For each position of the lists the tensor whose rows count there."""
    lists = [each for each in args if isinstance(each, (list, tuple)) and len(each) == len(args[0])]
    return [
        next((each for each in members if isinstance(each, cls)), None)
        for members in zip(*lists, strict=True)
    ]


def _local(value: Tensor) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def _wrap_as(value: Tensor, local: Tensor) -> Tensor:
    return _dtensor(local, value.shape, value._spec) if isinstance(value, DTensor) else local


def _dtensor(local: Tensor, shape: Sequence[int], spec: DTensorSpec) -> DTensor:
    meta = TensorMeta(torch.Size(shape), spec.tensor_meta.stride, local.dtype)  # type: ignore[union-attr]
    return DTensor(local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False)


# --- reductions ---------------------------------------------------------------------------------------------


def _argument(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    for position, argument in enumerate(func._schema.arguments):
        if argument.name == name and position < len(args):
            return args[position]
    return kwargs.get(name, default)


def _reduces_rows(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether rows are among what is reduced, and a rank without rows can be given something that changes nothing."""
    if _name(func) in ("linalg_vector_norm", "_foreach_norm") and _argument(func, "ord", args, kwargs, 2) < 0:
        return False
    dims = _argument(func, "dim", args, kwargs, None)
    dims = [dims] if isinstance(dims, int) else dims
    return not dims or any(dim % max(args[0].ndim, 1) == 0 for dim in dims)


def _neutral(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """What a rank without rows is given as one row; None: nothing."""
    name = _name(func)
    if name in ("linalg_vector_norm", "_foreach_norm"):
        return 0 if math.isinf(_argument(func, "ord", args, kwargs, 2)) else None
    if name in ("sum", "mean"):
        return None
    high = name in ("min", "amin")
    if dtype == torch.bool:
        return high
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).max if high else torch.iinfo(dtype).min
    return math.inf if high else -math.inf


def _reduce(cls: type[ShardedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first = args[0][0] if isinstance(args[0], (list, tuple)) else args[0]
    if _name(func) == "mean" and first.shard_info.groups:
        return _mean(first, func, args, kwargs)
    neutral = _neutral(func, args, kwargs, first.dtype)

    def partial(value: ShardedTensor) -> DTensor:
        local = value._local_tensor
        if neutral is not None and value.shape[:1] != (0,) and local.shape[:1] == (0,):
            local = local.new_full((1, *local.shape[1:]), neutral)
        return _plain(value, local)

    return func(*(_replace(cls, partial, each) for each in args), **kwargs)


def _mean(value: ShardedTensor, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    dims = _argument(func, "dim", args, kwargs, None) or list(range(value.ndim))
    keepdim = _argument(func, "keepdim", args, kwargs, False)
    count = math.prod(value.shape[dim] for dim in ([dims] if isinstance(dims, int) else dims))
    return aten.sum.dim_IntList(_plain(value), dims, keepdim, dtype=kwargs.get("dtype")) / count


# --- on DTensors --------------------------------------------------------------------------------------------


def _run_on_dtensors(
    cls: type[ShardedTensor], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, gather: bool
) -> Any:
    """Run on plain DTensors: with `gather` on whole ones where chunks are uneven, else on the rows as they are."""
    given = [*args, *kwargs.values()]
    mixed = any(isinstance(each, Tensor) and each.ndim and not isinstance(each, DTensor) for each in given)
    written = [each for each in _written(func, args, kwargs) if isinstance(each, cls)]
    uneven = next((each for each in written if gather and not mixed and not each.shard_info.is_even), None)
    if uneven is not None:
        raise NotImplementedError(
            f"{func} on {uneven.shard_info.name}: its rows are spread unevenly; compute the whole from full_tensor() "
            f"and write this rank's rows of it to to_local()"
        )
    gathered: dict[int, DTensor] = {}

    def plain(value: ShardedTensor) -> DTensor:
        spec = value._spec
        if not gather or mixed or value.shard_info.is_even:  # mixed: an error of DTensor's
            return _plain(value)
        if id(value) not in gathered:
            spec = DTensorSpec(spec.mesh, (Replicate(),) * spec.mesh.ndim, tensor_meta=spec.tensor_meta)
            gathered[id(value)] = DTensor(_whole(value), spec, requires_grad=False)
        return gathered[id(value)]

    result = func(
        *_replace(cls, plain, args), **{name: _replace(cls, plain, each) for name, each in kwargs.items()}
    )
    if func._schema.is_mutable:
        _count_writes(written)
        return None if result is None else kwargs.get("out", args[0])
    if gathered and func.is_view:
        view = functools.partial(
            _replace, DTensor, lambda each: GatheredView(each._local_tensor, each._spec, requires_grad=False)
        )
        return view(result)
    first = next((each for each in args if isinstance(each, cls)), None)
    if not gather and first is not None:
        same = lambda each: first.like(each._local_tensor) if each.shape == first.shape else each
        return _replace(DTensor, same, result)
    return result
