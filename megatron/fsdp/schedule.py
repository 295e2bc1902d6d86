"""The engine of one model: order of gathers and reductions, prefetch, in-flight limits.

Note [One order]
Ranks must launch collectives on a communicator in the same order, whatever happens in their graphs. Gathers follow
the order of forwards, which is the program's. Reductions are launched from a queue in a fixed order, not in the
order in which hooks fire: the reverse of the order of the units' forwards once all ranks were seen to agree on it, the
reverse of registration order before. A unit whose gradients are not all final when the pass ends (unused parameters)
contributes zeros.

Note [Final]
A parameter's AccumulateGrad node runs once per backward pass, after all its uses, so that a unit is final when every
trainable parameter's hook has fired. Under reentrant checkpointing each inner backward is a graph task of its own and
fires the hooks again; a unit that is called more than once then waits for the end of the outer pass.

Note [Flags]
`reduce_now` and `last_microbatch` are read when a unit's gradients become final. A temporary window is reduced if
`reduce_now`, else its gradient is kept unreduced; persistent buffers and the outer axis are reduced if
`last_microbatch`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.autograd import Variable
from torch.profiler import record_function

from megatron.fsdp.collectives import Communicator, all_equal
from megatron.fsdp.managed import ManagedParameter
from megatron.fsdp.order import OrderCheck
from megatron.fsdp.param_group import ParamGroup
from megatron.fsdp.reducer import Reducer
from megatron.fsdp.streams import Streams, make_streams
from megatron.fsdp.unit import Invocation, Phase, Unit, labels


class Engine:
    """Runs the units of one root module.

    Args:
        units: in registration order (children before the parents that own the rest).
        device: of the buffers.
        prefetch: units gathered ahead, in forward and in backward.
        max_reductions: reductions in flight before the oldest is waited for.
    """

    def __init__(
        self, units: Sequence[Unit], device: torch.device, prefetch: int = 1, max_reductions: int = 2
    ) -> None:
        self.units = list(units)
        self.device = device
        self.streams: Streams = make_streams(device)
        self.prefetch = prefetch
        self.reducer = Reducer(self.streams, max_reductions)
        self.reduce_now = True
        self.last_microbatch = True
        self.wait_at_end_of_backward = True
        self.forward_order: list[Unit] = []  # of the last complete root forward
        self._recording: list[Unit] = []
        self.in_forward = False  # of the root
        self._reduce_order = list(reversed(self.units))
        self._order_agreed = False
        self._queue: list[Unit] = []  # units still to be reduced in this pass
        self._in_pass = False
        self._pass_id = 0
        self._graph_task = -1
        self._order_check: OrderCheck | None = None
        self._held_back = False  # a pass ended that was not the step's last
        for unit in self.units:
            unit.engine = self

    # --- forward ------------------------------------------------------------

    def begin_forward(self) -> None:
        """A root forward (a microbatch) begins, outside backward."""
        if self._in_pass:  # the last backward ended with an exception
            self._abandon_pass()
        self._recording = []
        self.in_forward = True
        self.streams.begin_step()
        for unit in self.units:
            unit.calls = 0
            unit.in_forward = False
            if unit.phase is not Phase.IDLE:
                self.release(unit, force=True)
        self.gather_ahead()

    def begin_alone(self) -> None:
        """A unit (not the root) is used outside of a root forward."""
        self._recording = []
        self.streams.begin_step()

    def gather_ahead(self) -> None:
        """Start the gathers that are due once a step: replicated parameters, and outer shards."""
        for unit in self.units:
            for group in unit.groups:
                group.launch_outer_gather()
            self.launch_gather(
                unit, [group for group in unit.groups if not group.placements.parameters_released]
            )
        for unit in self.forward_order[: 1 + self.prefetch]:
            self.launch_gather(unit, unit.used_groups)

    def end_forward(self) -> None:
        """The root forward is complete: remember its order."""
        self.in_forward = False
        for unit in self._recording:
            unit.in_forward = False
        self.forward_order = self._recording
        self._recording = []
        if not self._order_agreed and torch.is_grad_enabled():
            self._agree_on_order()  # before the first backward: a resumed run sums as one that went on

    def enter_forward(self, unit: Unit, in_backward: bool) -> None:
        """Gather `unit` for a forward and start the next gathers."""
        self.acquire(unit)
        if in_backward:
            return
        unit.in_forward = True
        unit.calls += 1
        unit.called_twice |= unit.calls > 1
        self._recording.append(unit)
        if unit.phase is Phase.IDLE:
            unit.phase = Phase.FORWARD
        for other in self._next_forward(unit):
            self.launch_gather(other, other.used_groups)

    def leave_forward(self, unit: Unit, in_backward: bool, with_graph: bool) -> None:
        """Release `unit` after a forward, unless its backward comes next or it is to stay."""
        unit.in_forward = unit.in_forward and in_backward
        if unit.phase is Phase.BACKWARD:
            return
        unit.phase = Phase.IDLE
        if unit.reshard_after_forward and not (with_graph and not in_backward and self._is_last(unit)):
            self.release(unit, keep=unit.reshard_to)
        else:
            self._let_go(unit)

    def _next_forward(self, unit: Unit) -> list[Unit]:
        if unit.forward_prefetch is not None:
            return unit.forward_prefetch
        position = len(self._recording) - 1
        if position >= len(self.forward_order) or self.forward_order[position] is not unit:
            return []  # the order changed: no guesses
        return self.forward_order[position + 1 : position + 1 + self.prefetch]

    def _is_last(self, unit: Unit) -> bool:
        return bool(self.forward_order) and self.forward_order[-1] is unit

    # --- gather and release ------------------------------------------------------------

    def launch_gather(self, unit: Unit, groups: Sequence[ParamGroup]) -> None:
        """Start the gathers of `groups` that are due, one launch per communicator."""
        due = [group for group in groups if group.gather_due() and group.has_room()]
        if not due:
            return
        with record_function(f"fsdp.unshard {unit.name}"), torch.no_grad(), self.streams.gather():
            self.streams.log.add("gather", unit.name)
            by_comm: dict[Communicator, list[ParamGroup]] = {}
            for group in due:
                comm = group.prepare_gather()
                if comm is not None:
                    by_comm.setdefault(comm, []).append(group)
            for comm, members in by_comm.items():
                pending = comm.all_gather([group.compute for group in members], labels(members))
                for group in members:
                    group.gather_pending = pending

    def acquire(self, unit: Unit) -> None:
        """Make the compute parameters of `unit` usable and put them on the modules."""
        groups = unit.used_groups
        evicted = [group.slot.make_room(group) for group in groups if group.slot is not None]
        if any(evicted):
            self.streams.before_release()
        self.launch_gather(unit, groups)
        for group in groups:
            group.holders.add(unit.id)
            if group.gather_pending is not None:
                self.streams.log.add("wait_gather", unit.name)
                group.gather_pending.wait()
                group.gather_pending = None
            group.use_compute()
        self.streams.wait_gather()

    def release(self, unit: Unit, force: bool = False, keep: int | None = None) -> None:
        """Let go of the unit's compute parameters; groups that another unit holds stay.

        Args:
            unit: is idle from now on.
            force: whoever else holds its groups.
            keep: number of ranks among which the parameters stay until backward (`reshard_after_forward=<int>`).
        """
        unit.phase = Phase.IDLE
        idle = []
        for group in unit.used_groups:
            group.holders.discard(unit.id)
            if force:
                group.holders.clear()
            if group.holders:
                continue
            if group.gather_pending is not None:
                group.gather_pending.wait()
                group.gather_pending = None
            group.keep_part(keep)
            idle.append(group)
        if idle:
            self.streams.before_release()
        for group in idle:
            group.release()
        self.streams.log.add("release", unit.name)

    # --- backward ------------------------------------------------------------

    def enter_backward(self, unit: Unit, invocation: Invocation) -> None:
        """A gradient reached an output of `invocation`: its backward comes next."""
        self._begin_pass()
        if invocation in unit.in_backward:
            return
        unit.in_backward.add(invocation)
        self.reducer.poll()
        if unit.backward_needs_parameters:
            self.acquire(unit)
        unit.phase = Phase.BACKWARD
        for other in self._next_backward(unit):
            if (
                other.backward_needs_parameters
                and other.phase is not Phase.BACKWARD
                and not other.backward_over
            ):
                self.launch_gather(other, other.used_groups)

    def leave_backward(self, unit: Unit, invocation: Invocation | None = None) -> None:
        """All gradients of the invocation's inputs are computed (None: of all invocations)."""
        if invocation is not None:
            unit.in_backward.discard(invocation)
            if unit.in_backward or unit.phase is not Phase.BACKWARD:
                return
        unit.in_backward.clear()
        unit.backward_over = True
        if unit.in_forward:  # another microbatch's forward takes turns with this backward and needs it still
            unit.phase = Phase.FORWARD
        elif unit.reshard_after_backward:
            self.release(unit)
        else:
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        """End the use of `unit` without releasing what it gathered."""
        unit.phase = Phase.IDLE
        for group in unit.used_groups:
            group.holders.discard(unit.id)
            if not group.holders:
                group.use_sharded()

    def gradient_ready(self, unit: Unit, managed: ManagedParameter) -> None:
        """Autograd is done with a parameter in this graph task (Note [Final])."""
        self._begin_pass()
        managed.main_grad.collect()
        unit.fired.add(id(managed))
        if unit.called_twice and torch._C._current_graph_task_id() != self._graph_task:
            unit.wait_for_end = True
        if len(unit.fired) >= unit.wanted:
            self._drain()
            # Without inputs that want a gradient, nothing of the unit's backward can follow.
            if unit.in_backward and not any(invocation.num_inputs for invocation in unit.in_backward):
                self.leave_backward(unit)

    def delayed_gradient_ready(self, unit: Unit, parameters: Sequence[ManagedParameter]) -> None:
        """`backward_dw()` of a layer has run."""
        for managed in parameters:
            managed.main_grad.collect()  # layers assign a delayed bias gradient, and no hook fires
        if not unit.pending_writes():
            self._drain()
            if not self._in_pass and not self._queue:
                self._end_reductions()

    def _next_backward(self, unit: Unit) -> Sequence[Unit]:
        if unit.backward_prefetch is not None:
            return unit.backward_prefetch
        if unit not in self.forward_order:
            return []
        position = self.forward_order.index(unit)
        return self.forward_order[max(0, position - self.prefetch) : position][::-1]

    def _begin_pass(self) -> None:
        if self._in_pass:
            return
        self._in_pass = True
        self._pass_id += 1
        self._graph_task = torch._C._current_graph_task_id()
        self.reducer.finish_persistent()
        Variable._execution_engine.queue_callback(self._end_pass)
        self._queue = [unit for unit in self._reduce_order if unit.requires_grad]
        for unit in self.units:
            unit.fired.clear()
            unit.wait_for_end = unit.backward_over = False
            unit.wanted = unit.trainable()
            for group in unit.groups:
                group.gradients.pass_id = self._pass_id

    def _is_final(self, unit: Unit) -> bool:
        if unit.pending_writes():
            return False
        if not self._in_pass:
            return True
        return len(unit.fired) >= unit.wanted and not unit.wait_for_end

    def _drain(self) -> None:
        """Launch the reductions at the head of the queue that are final (Note [One order])."""
        while self._queue and self._is_final(self._queue[0]):
            self._reduce(self._queue.pop(0))

    def _end_pass(self) -> None:
        """Autograd's outermost backward is over."""
        self._in_pass = False
        self._held_back = not self.last_microbatch
        for unit in self.units:
            idle_but_gathered = unit.reshard_after_backward and any(group.gathered for group in unit.groups)
            if unit.phase is Phase.BACKWARD or (unit.phase is Phase.IDLE and idle_but_gathered):
                self.leave_backward(unit)
        self._drain()
        if not self._queue:
            self._end_reductions()

    def _abandon_pass(self) -> None:
        """A backward ended with an exception: what it left, and the gradients of its step, count no more."""
        self._in_pass = False
        self._queue = []
        self.reducer.finish()
        for unit in self.units:
            unit.in_backward.clear()
            for group in unit.groups:
                group.gradients.discard()

    # --- reductions -------------------------------------------------------------------------------------------

    def _reduce(self, unit: Unit) -> None:
        last = self.last_microbatch and unit.requires_sync and unit.requires_all_reduce
        now = (self.reduce_now or self.last_microbatch) and unit.requires_sync
        self.reducer.reduce(unit, now, last)

    def _end_reductions(self) -> None:
        if self.wait_at_end_of_backward:
            self.finish_reductions()

    def finish_reductions(self) -> None:
        """Wait until every reduction that was launched has been delivered."""
        self.reducer.finish()
        if not self._order_agreed and self.forward_order:
            self._agree_on_order()
        if self._order_check is not None:
            self._order_check.end_step()

    def check_order_every(self, steps: int) -> None:
        """Compare the order of launches between ranks every `steps` steps; 0: never."""
        self._order_check = OrderCheck(self.units, steps, self.device) if steps else None
        self.streams.log.watch = self._order_check.launched if self._order_check else None

    def reduce_all(self) -> None:
        """Reduce what was accumulated and not yet reduced (passes that were not the step's last)."""
        for unit in self.units:
            if unit.pending_writes():
                raise RuntimeError(f"{unit.name}: backward_dw() of a layer with delayed wgrad was not called")
        if not self._held_back:
            return
        self._held_back = False
        for unit in self._reduce_order:
            if unit.requires_grad:
                self.reducer.reduce(unit, now=True, last=True)

    def _agree_on_order(self) -> None:
        """Reduce in reverse forward order from now on if all ranks had the same (Note [One order])."""
        self._order_agreed = True
        seen: dict[int, Unit] = {unit.id: unit for unit in self.forward_order}
        order = [unit for unit in reversed(self.units) if unit.id not in seen] + list(reversed(seen.values()))
        names = "\n".join(unit.name for unit in order)
        digest = int.from_bytes(hashlib.sha256(names.encode()).digest()[:4], "big")
        comms = dict.fromkeys(group.comms.gather for unit in self.units for group in unit.groups)
        # Every rank takes part in all comparisons, whatever the first ones say. The second round tells the ranks of
        # one group what those of their other groups found.
        first = [all_equal(digest, comm, self.device) for comm in comms]
        second = [all_equal(int(all(first)), comm, self.device) for comm in comms]
        if all(first) and all(second):
            self._reduce_order = order
