"""Records what a step of FSDP would run on which stream, on CPU with a fake process group.

A dispatch mode sees every operator, backward's and collectives' included; the engine's streams say what is current. As
on NCCL, a collective runs on a stream of its communicator that waits for the one that launches it, and its handle makes
the stream that waits for it wait.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.fsdp import collectives
from megatron.fsdp.schedule import Engine
from tests.unit.fsdp.stream_model import Allocate, Free, Record, Wait, WaitHandle, Work

HOST_SYNCHRONISATIONS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "unique", "masked_select")


class Recorder(TorchDispatchMode):
    """Records while it is active; `records` and `synchronisations` (names of operators that make the host wait)."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.records: list[Record] = []
        self.synchronisations: list[str] = []
        self.current = "compute"
        self._known: dict[int, StorageWeakRef] = {}
        self._names: dict[int, int] = {}
        self._communicator: collectives.Communicator | None = None
        self._handles = 0
        self.unclaimed: list[int] = []

    # --- what the engine's streams say ------------------------------------------------------------------------

    def use(self, stream: str) -> None:
        self.current = stream

    def wait(self, waiter: str, waited: str) -> None:
        self._notice_freed()
        self.records.append(Wait(waiter, waited))

    # --- operators --------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._notice_freed()
        name = func._schema.name.split("::")[-1]
        if name in HOST_SYNCHRONISATIONS:
            self.synchronisations.append(name)
        reads, writes = self._operands(func, args, kwargs)
        before = set(reads) | set(writes)
        output = func(*args, **kwargs)
        made = [t for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        new = [key for key in map(self._key, made) if key not in before]
        if func._schema.name.startswith("c10d::"):
            self._collective(name, reads | writes)
        elif not _is_view(func) or new:
            writes |= set(new)
            self.records.append(Work(self.current, name, frozenset(reads - writes), frozenset(writes)))
        return output

    def _operands(self, func: Any, args: Any, kwargs: Any) -> tuple[set[int], set[int]]:
        reads: set[int] = set()
        writes: set[int] = set()
        if func._schema.name == "aten::detach" or _is_view(func):
            return {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}, writes
        for argument, value in zip(func._schema.arguments, args, strict=False):
            target = writes if argument.alias_info is not None and argument.alias_info.is_write else reads
            target |= {self._key(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
        for key, value in kwargs.items():
            target = writes if key == "out" else reads
            target |= {self._key(t) for t in tree_leaves(value) if isinstance(t, torch.Tensor)}
        return reads, writes

    def _collective(self, name: str, buffers: set[int]) -> None:
        assert self._communicator is not None, f"{name} outside of a Communicator"
        stream = f"communicator {id(self._communicator)}"
        self._handles += 1
        self.records.append(Wait(stream, self.current))
        # Gathers and reductions work in place: what they read they also write.
        self.records.append(Work(stream, name, frozenset(), frozenset(buffers), self._handles))
        self.unclaimed.append(self._handles)

    # --- buffers ----------------------------------------------------------------------------------------------

    def _key(self, tensor: torch.Tensor) -> int:
        storage = tensor.untyped_storage()
        address = storage._cdata
        known = self._known.get(address)
        if known is None or known.expired():
            if known is not None:
                self._free(address)
            self._known[address] = StorageWeakRef(storage)
            self._names[address] = len(self.records) * 1000 + len(self._names)
            self.records.append(Allocate(self.current, self._names[address]))
        return self._names[address]

    def resized(self, storage: torch.UntypedStorage, size: int) -> None:
        """A storage is released (size 0) or allocated anew."""
        address = storage._cdata
        if size == 0 and address in self._names:
            self._free(address)
        self._known.pop(address, None)

    def _free(self, address: int) -> None:
        self.records.append(Free(self._names.pop(address)))
        self._known.pop(address, None)

    def _notice_freed(self) -> None:
        for address in [address for address, known in self._known.items() if known.expired()]:
            self._free(address)


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    return bool(returns) and any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@contextlib.contextmanager
def recording(engine: Engine) -> Iterator[Recorder]:
    """Record what the body runs under `engine`."""
    recorder = Recorder(engine)
    with pytest.MonkeyPatch.context() as patch:
        _watch_communicators(patch, recorder)
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            recorder.resized(storage, size)
            return resize(storage, size)

        patch.setattr(torch.UntypedStorage, "resize_", resized)
        engine.streams.recorder = recorder
        try:
            with recorder:
                yield recorder
        finally:
            engine.streams.recorder = None


def _watch_communicators(patch: pytest.MonkeyPatch, recorder: Recorder) -> None:
    """Tell the recorder whose collective it sees, and who waits for which."""

    def watched(method: Any) -> Any:
        def run(comm: collectives.Communicator, *args: Any) -> Any:
            recorder._communicator, before = comm, recorder._communicator
            try:
                return method(comm, *args)
            finally:
                recorder._communicator = before

        return run

    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        patch.setattr(collectives.Communicator, name, watched(getattr(collectives.Communicator, name)))
    make, wait = collectives.WorkList.__init__, collectives.WorkList.wait

    def made(work: Any, *args: Any, **kwargs: Any) -> None:
        make(work, *args, **kwargs)
        work.handles, recorder.unclaimed = recorder.unclaimed, []

    def waited(work: Any) -> None:
        for handle in work.handles:
            recorder.records.append(WaitHandle(recorder.current, handle))
        wait(work)

    patch.setattr(collectives.WorkList, "__init__", made)
    patch.setattr(collectives.WorkList, "wait", waited)
    patch.setattr(collectives.WorkList, "poll", lambda _work: False)  # a GPU is late
