"""How one tensor of ours is made of tensors of Hugging Face's, and taken apart again, bit for bit.

A `Rule` names them; its `Form` says how. Forms work on any dtype and device, also on meta, where they tell shapes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


class Form(ABC):
    """Theirs -> ours (`join`) and ours -> theirs (`split`); one undoes the other."""

    @abstractmethod
    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor."""

    @abstractmethod
    def split(self, whole: Tensor) -> list[Tensor]:
        """Their tensors."""


@dataclass(frozen=True)
class Same(Form):
    """One tensor, as it is."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The tensor."""
        return parts[0]

    def split(self, whole: Tensor) -> list[Tensor]:
        """The tensor."""
        return [whole]


@dataclass(frozen=True)
class Rows(Form):
    """`count` tensors of equal size, rows one after the other: [gate; up]."""

    count: int = 2

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[count * n, ...] of [n, ...] each."""
        return torch.cat(list(parts))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The opposite."""
        return list(whole.chunk(self.count))


@dataclass(frozen=True)
class QueryGroups(Form):
    """Queries, keys, values [heads * head_dim, ...] -> rows by query group: its queries, its key, its value."""

    groups: int
    head_dim: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """[(heads + 2 groups) * head_dim, ...]."""
        rest = parts[0].shape[1:]
        pieces = [part.reshape(self.groups, -1, self.head_dim, *rest) for part in parts]
        return torch.cat(pieces, dim=1).reshape(-1, *rest)

    def split(self, whole: Tensor) -> list[Tensor]:
        """The opposite."""
        rest = whole.shape[1:]
        grouped = whole.reshape(self.groups, -1, self.head_dim, *rest)
        queries = grouped.shape[1] - 2
        return [part.reshape(-1, *rest) for part in grouped.split((queries, 1, 1), dim=1)]


@dataclass(frozen=True)
class Joined(Form):
    """One tensor of theirs that holds the `count` parts of `inner` one after the other, as rows."""

    inner: Form
    count: int

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Take theirs apart, then as `inner`."""
        return self.inner.join(parts[0].chunk(self.count))

    def split(self, whole: Tensor) -> list[Tensor]:
        """The opposite."""
        return [torch.cat(self.inner.split(whole))]


@dataclass(frozen=True)
class Transposed(Form):
    """Theirs are [in, out] (GPT-2's Conv1D)."""

    inner: Form = field(default_factory=Same)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Transpose, then as `inner`."""
        return self.inner.join([part.t() for part in parts]).contiguous()

    def split(self, whole: Tensor) -> list[Tensor]:
        """The opposite."""
        return [part.t().contiguous() for part in self.inner.split(whole)]


@dataclass(frozen=True)
class Rule:
    """ours: global name in our model. theirs: names in theirs, in the form's order."""

    ours: str
    theirs: tuple[str, ...]
    form: Form = field(default_factory=Same)


@dataclass(frozen=True)
class Copy:
    """A tensor of theirs that repeats another (a tied head, the embedding of a prediction layer).

    always: it is written; else only where the folder that is imitated has it.
    """

    name: str
    of: str
    always: bool = False


@dataclass(frozen=True)
class WeightMap:
    """All rules of a model. ignored: names of theirs that hold no weights."""

    rules: tuple[Rule, ...]
    copies: tuple[Copy, ...] = ()
    ignored: Callable[[str], bool] = lambda name: False
