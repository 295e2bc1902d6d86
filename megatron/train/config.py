"""The validated, frozen configuration of a run. Made by megatron.train.arguments.validate."""

from __future__ import annotations

import difflib
import enum
import json
from collections.abc import Iterator, Mapping
from typing import Any


class TrainConfig(Mapping[str, Any]):
    """All of Megatron's argument names as read-only attributes, with the derived ones resolved.

    Derived (beside the flags' own names): world_size, data_parallel_size, num_microbatches,
    global_batch_size, sharding_strategy and outer_sharding_strategy (names of
    megatron.fsdp.ShardingStrategy), params_dtype, main_params_dtype, main_grads_dtype, grad_comm_dtype
    ("fp64", "fp32", "bf16", "fp16"), device ("cpu", "cuda"), virtual_pipeline_model_parallel_size,
    gated_linear_unit, ...; megatron/train/arguments/resolve.py makes them.

    explicit: destinations that the user gave (command line or YAML), so that a loaded checkpoint's arguments
    override defaults only. warnings, notes: lines for rank 0's log. Lists become tuples; nothing can be
    assigned.
    """

    __slots__ = ("_values", "explicit", "notes", "warnings")

    _values: dict[str, Any]
    explicit: frozenset[str]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    def __init__(
        self,
        values: Mapping[str, Any],
        explicit: frozenset[str] = frozenset(),
        warnings: tuple[str, ...] = (),
        notes: tuple[str, ...] = (),
    ) -> None:
        frozen = {name: _freeze(value) for name, value in values.items()}
        object.__setattr__(self, "_values", frozen)
        object.__setattr__(self, "explicit", frozenset(explicit))
        object.__setattr__(self, "warnings", tuple(warnings))
        object.__setattr__(self, "notes", tuple(notes))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_values":
            raise AttributeError(name)
        values: dict[str, Any] = object.__getattribute__(self, "_values")
        if name in values:
            return values[name]
        near = difflib.get_close_matches(name, values, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise AttributeError(f"the configuration has no {name!r}{hint}")

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"the configuration is frozen: make another with replace({name}=...)")

    def __delattr__(self, name: str) -> None:
        raise AttributeError("the configuration is frozen")

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainConfig) and self._values == other._values

    def __hash__(self) -> int:
        return hash(tuple(sorted((name, repr(value)) for name, value in self._values.items())))

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={self._values[name]!r}" for name in sorted(self.explicit) if name in self)
        return f"TrainConfig({given}, ...)"

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainConfig, (self._values, self.explicit, self.warnings, self.notes)

    def replace(self, **changes: object) -> TrainConfig:
        """A copy with other values, not validated again. Raises ValueError for a name that is not there."""
        unknown = sorted(set(changes) - set(self._values))
        if unknown:
            raise ValueError(f"the configuration has no {', '.join(unknown)}")
        return TrainConfig({**self._values, **changes}, self.explicit, self.warnings, self.notes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values (JSON types) in alphabetical order: for logs, checkpoints and --validate-only."""
        return {name: _plain(self._values[name]) for name in sorted(self._values)}

    def to_json(self) -> str:
        """The resolved configuration as indented JSON."""
        return json.dumps(self.as_dict(), indent=2)


def _freeze(value: Any) -> Any:
    return tuple(_freeze(item) for item in value) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return str(value)
