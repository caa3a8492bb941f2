"""Execute a program: one worker's actions of one step, in order, with its receives posted ahead of time."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polylane.errors import ActionFailed, PeerLost
from polylane.graph.batch import bounds
from polylane.graph.part import Part
from polylane.observe.timeline import Span
from polylane.plan.slow import Slow
from polylane.program.program import Program
from polylane.program.relay import Box, shape_of
from polylane.runtime.division import Batch, Share, shares
from polylane.runtime.finite import Anomalies
from polylane.runtime.mesh import Mesh
from polylane.runtime.relays import Relays, place, taken
from polylane.runtime.sample_witness import is_watched, witness
from polylane.runtime.stage import StageRunner, Wire, node_at_fault
from polylane.runtime.sync.all_reduce import Reducer
from polylane.runtime.transport.protocol import Pending, Transport
from polylane.samples.statistics import Replicas, Statistics
from polylane.schedule.action import Action, Kind

# Compute actions ahead of which receives are posted: gloo moves a message only once its receive is posted.
LOOKAHEAD = 2


# What was sent: microbatch, peer, and whether it was gradients.
_Sent = tuple[int, int, bool]


@dataclass
class StepState:
    """What a worker gathers in the course of one step."""

    shares: dict[int, Share]
    parts: dict[int, Part]
    sizes: dict[int, int]  # samples of the whole microbatch, of all replicas
    counted: int  # samples over which gradients are means
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    returned: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    outgoing: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    received: dict[Action, Pending] = field(default_factory=dict)
    sent: dict[_Sent, list[Pending]] = field(default_factory=dict)
    total: list[Tensor] = field(default_factory=list)
    count: list[Tensor | float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def left(self, key: _Sent) -> None:
        """Wait until something has been sent, and let go of it."""
        for pending in self.sent.pop(key, ()):
            pending.wait()

    def sums(self) -> tuple[float, float]:
        """The loss of what this worker computed, as (total, count)."""
        return float(sum(float(total) for total in self.total)), float(sum(float(count) for count in self.count))


class Worker:
    """Runs one program, step after step.

    Args:
        program: what to do.
        runner: the stage's code on this worker's tensors.
        wires: how travelling values look.
        relays: which pieces of them go where.
        transport: carries values and gradients; declared with the program's channels and groups.
        statistics: sums statistics and counts of the batch over the replicas, apart from the gradients.
        reducer: sums gradients.
        mesh: along which operators are split; the loss of its first worker counts, the others compute the same one.
        alone: the replica takes steps of its own: its gradients are those of the mean over its own samples.
        slow: makes it a straggler.
        counts: statistics of the whole batch that this stage's operators need; None: none.
        per_sample: modules that treat each sample by itself, as the plan says: they are watched.
    """

    def __init__(
        self,
        program: Program,
        runner: StageRunner,
        wires: Mapping[str, Wire],
        relays: Relays,
        transport: Transport,
        statistics: Callable[[Tensor], Tensor] | None,
        reducer: Reducer,
        mesh: Mesh,
        alone: bool = False,
        slow: Slow | None = None,
        counts: Statistics | None = None,
        per_sample: Sequence[str] = (),
    ) -> None:
        self.program = program
        self.runner = runner
        self.wires = wires
        self.relays = relays
        self.transport = transport
        self.statistics = statistics
        self.reducer = reducer
        self.mesh = mesh
        self.alone = alone
        self.anomalies: Anomalies | None = None  # what looks at forward passes in training
        self._slow, self._slowness = slow, 1.0
        self._counts, self._per_sample = counts, per_sample
        self._horizon = _horizons(program.actions)

    def shares(self, batch: int) -> tuple[Share, ...]:
        """What this worker computes of a batch of so many samples."""
        return shares(batch, self._microbatches(), len(self.program.replicas), self.program.replica)

    def run(self, batch: Batch, step: int, seed: int, finish: Callable[[StepState], None]) -> StepState:
        """One step. ``finish`` is what the STEP action does.

        Raises:
            ActionFailed: from what an action raised, saying which.
        """
        own = {s.microbatch: s for s in self.shares(batch.samples) if s.weight or not self.alone}
        parts = self._with_counts(batch, own, self._parts(batch.samples, own, step, seed))
        ends = bounds(batch.samples, self._microbatches())
        self._slowness = 1.0 if self._slow is None else self._slow.at(step, self.program.rank)
        counted = sum(s.samples for s in own.values()) if self.alone else batch.samples
        state = StepState(own, parts, {i: ends[i][1] - ends[i][0] for i in own}, counted)
        last_backward = max(
            (i for i, a in enumerate(self.program.actions) if a.kind is Kind.BACKWARD and a.microbatch in own),
            default=-1,
        )
        watch = self.runner.code.watch
        watch.records = [] if self._has_witness(step, len(own)) else None
        posted = 0
        for index, action in enumerate(self.program.actions):
            if action.microbatch is not None and action.microbatch not in own:
                continue  # a microbatch without samples, skipped by every worker alike
            if action.kind is Kind.REDUCE and not own:
                continue  # this replica, which goes its own way, has no samples of this batch
            if action.kind in _TRAVEL and self._piece(action, state) is None:
                continue  # of these samples nothing goes this way
            try:
                while posted < self._horizon[index]:
                    self._post(self.program.actions[posted], state)
                    posted += 1
                if index == last_backward:
                    self.reducer.arm()
                self._do(action, batch, state, finish)
                if index == last_backward:
                    self.reducer.flush()
            except (ActionFailed, PeerLost):
                raise
            except Exception as error:
                node = node_at_fault(self.runner, error)
                module = None if node is None else (node.module or "the model's own forward")
                raise ActionFailed(
                    self.program.rank, action.stage, action.microbatch, module, node.source if node else None
                ) from error
        for key in list(state.sent):
            state.left(key)
        return state

    def _parts(self, batch: int, own: Mapping[int, Share], step: int, seed: int) -> dict[int, Part]:
        """What the operators may know of the samples in hand, by microbatch."""
        averaged = sum(share.samples for share in own.values()) if self.alone else batch
        return {i: replace(self._part(share, batch, step, seed), averaged=averaged) for i, share in own.items()}

    def _with_counts(self, batch: Batch, own: Mapping[int, Share], parts: dict[int, Part]) -> dict[int, Part]:
        """The parts with what must be counted over the whole batch before any of them is computed on."""
        replicas = self.program.replicas
        apart = self.alone or self._together or len(replicas) == 1
        if not self._counts or (apart and len(parts) < 2):  # the part is the whole
            return parts
        ordered = [parts[i] for i in sorted(parts)]
        leaves = [batch.of(own[i]) for i in sorted(parts)]
        others = None if apart else Replicas(self._add_replicas, self.program.replica, len(replicas))
        try:
            found = self._counts.count(ordered, leaves, self.runner.tensors, others)
        except PeerLost:
            raise
        except Exception as error:
            module = "what is counted of the whole batch"
            raise ActionFailed(self.program.rank, self.program.stage, None, module, None) from error
        return {i: replace(part, whole=lambda key, _: found[key]) for i, part in parts.items()}

    def _has_witness(self, step: int, microbatches: int) -> bool:
        """Whether what the plan says of the user's own Python is held against the whole batch in a step."""
        one = microbatches < 2 and (self.alone or len(self.program.replicas) == 1)
        trains = any(action.kind is Kind.STEP for action in self.program.actions)
        return bool(self._per_sample) and trains and is_watched(step) and not (one or self._together)

    def _call_witness(self) -> None:
        records = self.runner.code.watch.records
        if records:
            graph = self.program.partition.graph
            named = "+".join(self._per_sample)
            witness(graph.code.fx, records, self._gather, graph.mean or not graph.opaque, named)
        self.runner.code.watch.records = None

    def _gather(self, tensor: Tensor) -> list[Tensor]:
        """A tensor of one dimension of every replica."""
        replicas = self.program.replicas
        if self.alone or len(replicas) == 1:
            return [tensor]
        own = torch.tensor([tensor.numel()], device=tensor.device)
        sizes = self.transport.all_gather(own, replicas).wait().tolist()
        return list(self.transport.all_gather(tensor.flatten(), replicas, sizes).wait().split(sizes))

    def _add_replicas(self, tensor: Tensor) -> Tensor:
        if self.statistics is not None:
            return self.statistics(tensor)
        return self.transport.all_reduce(tensor, self.program.replicas).wait()

    def _part(self, share: Share, batch: int, step: int, seed: int) -> Part:
        """What the operators may know of the samples in hand."""
        if self._together:  # replicas hold the microbatch as one, each its rows of it
            begin, end = bounds(batch, self._microbatches())[share.microbatch]
            return Part(end - begin, begin, batch, share.microbatch, step, seed)
        return Part(
            samples=share.samples,
            first=share.start,
            batch=batch,
            microbatch=share.microbatch,
            step=step,
            seed=seed,
            weight=share.weight,
            sum_replicas=self._sum_replicas if self.statistics is not None else None,
        )

    @property
    def _together(self) -> bool:
        """Whether replicas split operators too: samples meet in this graph."""
        return "data" in self.mesh.axes

    def _microbatches(self) -> int:
        return 1 + max((a.microbatch for a in self.program.actions if a.microbatch is not None), default=0)

    def _post(self, action: Action, state: StepState) -> None:
        if action.kind is not Kind.RECEIVE or action.microbatch not in state.shares:
            return
        piece = self._piece(action, state)
        if piece is not None:
            assert action.value is not None and action.peer is not None
            dtype = self.wires[action.value].dtype
            state.received[action] = self.transport.receive(shape_of(piece), dtype, action.peer)

    def _piece(self, action: Action, state: StepState) -> Box | None:
        """What of this worker's part of a value is sent or received, by positions in that part."""
        assert action.value is not None and action.peer is not None and action.microbatch is not None
        find = self.relays.sent if action.kind is Kind.SEND else self.relays.received
        return find(action.value, action.peer, state.sizes[action.microbatch], action.gradient)

    def _sum_replicas(self, tensor: Tensor) -> Tensor:
        assert self.statistics is not None
        start = time.perf_counter()
        result = self.statistics(tensor)
        self.mesh.waits.seconds += time.perf_counter() - start
        self.mesh.waits.bytes += tensor.nbytes if len(self.program.replicas) > 1 else 0
        return result

    def _do(self, action: Action, batch: Batch, state: StepState, finish: Callable[[StepState], None]) -> None:
        waits = self.mesh.waits
        start, waits.seconds, waits.bytes = time.perf_counter(), 0.0, 0
        if action.kind is Kind.FORWARD:
            self._forward(action, batch, state)
            self._linger(start)
        elif action.kind is Kind.BACKWARD:
            self._backward(action, state)
            self._linger(start)
        elif action.kind is Kind.SEND:
            self._send(action, state)
        elif action.kind is Kind.RECEIVE:
            self._receive(action, state)
        elif action.kind is Kind.REDUCE:
            assert action.value is not None
            start = self.reducer.wait(action.value)
            waits.bytes = self.reducer.bytes[action.value]
        else:
            self._call_witness()
            before = self.transport.counters.given
            finish(state)
            waits.bytes += self.transport.counters.given - before
        end = time.perf_counter()
        state.spans.append(Span(self.program.rank, action, start, end, waits.seconds, waits.bytes))

    def _linger(self, start: float) -> None:
        """Let a pass that began then last as long as it would on a slower worker."""
        if self._slowness > 1:
            worked = time.perf_counter() - start - self.mesh.waits.seconds
            time.sleep(max(0.0, worked) * (self._slowness - 1))

    def _forward(self, action: Action, batch: Batch, state: StepState) -> None:
        i = action.microbatch
        assert i is not None
        share, part = state.shares[i], state.parts[i]
        leaves = batch.of(share, rows=share.weight * share.samples if self._together else None)
        values = state.values.pop(i, {})
        for crossing in self.program.receives:
            if crossing.value not in values:  # of which this worker has an empty part
                values[crossing.value] = self._zeros(crossing.value, part.samples)
        live = self.runner.forward(i, values, leaves, part)
        if self.anomalies is not None and share.weight and torch.is_grad_enabled():
            program = self.program
            self.anomalies.look(self.runner, program.partition.graph, program.stage, values, leaves, part, live)
        state.outgoing[i] = live.outputs
        if (
            live.loss and share.weight and self.mesh.first
        ):  # what a stand-in computes counts for nothing, were it not a number
            total = live.loss[0].detach().double()  # so that a printed loss is the one device's to the last digit
            # A scalar mean counts for as many samples as it was taken over; a Mean brings its own count.
            mean = len(live.loss) == 1
            state.total.append(total * part.samples if mean else total)
            state.count.append(part.samples if mean else live.loss[1].detach())

    def _backward(self, action: Action, state: StepState) -> None:
        i = action.microbatch
        assert i is not None
        seed = None
        if self.runner.code.has_loss:
            part = state.parts[i]
            mean = len(self.runner.live[i].loss) == 1
            seed = torch.tensor(
                part.weight * (part.samples if mean else 1) / state.counted,
                device=self.runner.device,
                dtype=torch.float64,
            )
        # Whoever got something two microbatches ago has had it since: nobody waits for this worker before they take it.
        for key in [key for key in state.sent if key[0] <= i - 2]:
            state.left(key)
        for earlier in [earlier for earlier in state.returned if earlier <= i - 2]:
            del state.returned[earlier]
        state.outgoing.pop(i, None)  # with the autograd graph that hangs on it
        gradients = state.gradients.pop(i, {})
        for crossing in self.program.sends:
            if crossing.requires_grad and crossing.value not in gradients:  # nobody was asked for anything
                gradients[crossing.value] = self._zeros(crossing.value, state.parts[i].samples)
        state.returned[i] = self.runner.backward(i, gradients, seed)

    def _send(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        value = (state.returned if action.gradient else state.outgoing)[i][name]
        wire, samples = self.wires[name], state.parts[i].samples
        if tuple(value.shape) != wire.shape(samples) or value.dtype != wire.dtype:
            # Checked here because gloo ends the process when sizes disagree.
            raise RuntimeError(
                f"the value {name} is {value.dtype} {tuple(value.shape)} where capture saw "
                f"{wire.dtype} {wire.shape(samples)}"
            )
        piece = self._piece(action, state)
        assert piece is not None
        value = taken(value.detach(), piece)
        factor = self.relays.factor(name, action.peer, state.sizes[i], action.gradient)
        value = value if factor == 1.0 else value * factor
        state.sent.setdefault((i, action.peer, action.gradient), []).append(self.transport.send(value, action.peer))
        self.mesh.waits.bytes += value.nbytes

    def _receive(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        value, piece = state.received.pop(action).wait(), self._piece(action, state)
        assert piece is not None
        self.mesh.waits.bytes += value.nbytes
        if action.gradient:  # an answer to values that have arrived
            state.left((i, action.peer, False))
        found = (state.gradients if action.gradient else state.values).setdefault(i, {})
        if value.shape != self.wires[name].shape(state.parts[i].samples):
            into = found.pop(name, None)
            into = self._zeros(name, state.parts[i].samples) if into is None else into
            place(into, piece, value, add=action.gradient or self.relays.summed(name))
            value = into
        found[name] = value if name not in found else found[name] + value

    def _zeros(self, name: str, samples: int) -> Tensor:
        wire = self.wires[name]
        return torch.zeros(wire.shape(samples), dtype=wire.dtype, device=self.runner.device)


_TRAVEL = (Kind.SEND, Kind.RECEIVE)


def _horizons(actions: tuple[Action, ...]) -> list[int]:
    """For every action, how far ahead of it receives are posted."""
    compute = [i for i, a in enumerate(actions) if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
    ahead = [bisect_left(compute, index) + LOOKAHEAD for index in range(len(actions))]
    return [compute[i] if i < len(compute) else len(actions) for i in ahead]
