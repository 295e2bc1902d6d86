"""The order of launches, compared between ranks every few steps.

Collectives of one communicator match by their order alone. A rank whose units run in another order than its peers'
gathers and reduces other parameters than they do: where the sizes agree, nothing fails and the weights are wrong. With
`FSDPConfig.order_check_interval` (or `set_order_check` of an FSDPModule) every rank keeps the sequence of its launches
and compares a hash of it with its peers'. A step in which nothing is compared costs one list entry a launch; a
comparison is one collective of 16 bytes a group of ranks and one host synchronisation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist

from megatron.fsdp.collectives import Communicator, all_equal
from megatron.fsdp.unit import Unit

_OPERATIONS = ("gather", "reduce")


class OrderCheck:
    """Compares the launches of `units` with the other ranks' after every `interval` steps.

    Args:
        units: of one engine; their order is the same on all ranks (checked when the model was wrapped).
        interval: steps between comparisons.
        device: of the compared numbers.
    """

    def __init__(self, units: Sequence[Unit], interval: int, device: torch.device) -> None:
        self.units = list(units)
        self.interval = interval
        self.device = device
        self._index = {unit.name: index for index, unit in enumerate(self.units)}
        self._launches: list[int] = []
        self._steps = 0

    def launched(self, event: str, name: str) -> None:
        """Note one launch; other events are passed over."""
        if event in _OPERATIONS:
            self._launches.append(len(_OPERATIONS) * self._index[name] + _OPERATIONS.index(event))

    def end_step(self) -> None:
        """A step is over: compare if it is time.

        Raises:
            RuntimeError: on every rank of a group whose ranks differ, naming a rank and the units.
        """
        self._steps += 1
        if self._steps % self.interval:
            return
        for comm in self._communicators():
            launches = [code for code in self._launches if comm in self._of(code)]
            digest = hashlib.sha256(repr(launches).encode()).digest()
            if not all_equal(int.from_bytes(digest[:7], "big"), comm, self.device):
                self._explain(comm, launches)
        self._launches.clear()

    def _communicators(self) -> list[Communicator]:
        found = [comm for unit in self.units for comm in _communicators_of(unit)]
        return [comm for comm in dict.fromkeys(found) if comm.size > 1]

    def _of(self, code: int) -> list[Communicator]:
        return _communicators_of(self.units[code // len(_OPERATIONS)])

    def _explain(self, comm: Communicator, launches: list[int]) -> None:
        """Find the first launch that differs from the group's first rank's and raise."""
        counts = _gather(torch.tensor([len(launches)], device=self.device), comm)
        padded = torch.full((int(max(count.item() for count in counts)),), -1, device=self.device)
        padded[: len(launches)] = torch.tensor(launches, dtype=padded.dtype, device=self.device)
        sequences = torch.stack(_gather(padded, comm)).tolist()
        ranks = dist.get_process_group_ranks(comm.group)
        first = sequences[0]
        position, other = min(
            next((i, rank) for i, (a, b) in enumerate(zip(first, codes, strict=True)) if a != b)
            for rank, codes in enumerate(sequences)
            if codes != first
        )
        raise RuntimeError(
            f"FSDP: rank {ranks[other]} launched {self._name(sequences[other][position])} where rank {ranks[0]} "
            f"launched {self._name(first[position])} (launch {position} of the last {self.interval} step(s)). "
            f"All ranks must run the same units in the same order; weights since then are wrong"
        )

    def _name(self, code: int) -> str:
        if code < 0:
            return "nothing more"
        return f"the {_OPERATIONS[code % len(_OPERATIONS)]} of {self.units[code // len(_OPERATIONS)].name}"


def _communicators_of(unit: Unit) -> list[Communicator]:
    return list(dict.fromkeys(group.comms.gather for group in unit.used_groups))


def _gather(values: torch.Tensor, comm: Communicator) -> list[torch.Tensor]:
    parts = [torch.empty_like(values) for _ in range(comm.size)]
    dist.all_gather(parts, values, group=comm.group)
    return parts
