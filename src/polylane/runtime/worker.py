"""Execute a program: one worker's actions of one step, in order, with its receives posted ahead of time."""

from __future__ import annotations

import copy
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
from polylane.runtime.batch_tables import BatchTables, build_tables, count_microbatches
from polylane.runtime.division import Batch, Share, shares
from polylane.runtime.finite import Anomalies
from polylane.runtime.mesh import Mesh
from polylane.runtime.relays import Relays, place, taken
from polylane.runtime.sample_witness import is_watched, witness
from polylane.runtime.stage import StageRunner, node_at_fault
from polylane.runtime.sync.all_reduce import Reducer
from polylane.runtime.transport.protocol import Pending, Transport
from polylane.runtime.value_spec import Wire
from polylane.samples.statistics import Replicas, Statistics
from polylane.schedule.action import Action, Kind

# Compute actions ahead of which receives are posted: gloo moves a message only once its receive is posted.
LOOKAHEAD = 2


# What was sent: microbatch, peer, and whether it was gradients.
_Sent = tuple[int, int, bool]


@dataclass
class StepState:
    """What a worker gathers in the course of one step."""

    shares: Mapping[int, Share]
    parts: dict[int, Part]
    tables: BatchTables
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

    Before it runs it is fitted to the size of a batch, see :meth:`fit_to_samples`.

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
        self._counts, self._per_sample = counts or None, per_sample
        self._horizon = _horizons(program.actions)
        self.microbatches = count_microbatches(program)
        self._reduces = any(len(bucket.ranks) > 1 for bucket in program.buckets)
        self._speaks = mesh.first  # one of all that compute the same whole loss
        self._tables: BatchTables | None = None

    def shares(self, batch: int) -> tuple[Share, ...]:
        """What this worker computes of a batch of so many samples."""
        return shares(batch, self.microbatches, len(self.program.replicas), self.program.replica)

    def fit_to_samples(self, samples: int) -> Worker:
        """This worker for batches of one size: with its tables, and with the code for each of its parts."""
        fitted, own = copy.copy(self), {s.microbatch: s for s in self.shares(samples) if s.weight or not self.alone}
        tables = build_tables(self.program, self.relays, self.wires, samples, own, self._together)
        fitted._tables, fitted.runner = tables, self.runner.fit_to_sizes(set(tables.held.values()))
        return fitted

    def run(self, batch: Batch, step: int, seed: int, finish: Callable[[StepState], None]) -> StepState:
        """One step. ``finish`` is what the STEP action does.

        Raises:
            ActionFailed: from what an action raised, saying which.
        """
        tables = self._tables
        assert tables is not None and tables.samples == batch.samples, "a worker runs batches of the size it is fit for"
        own, last_backward = tables.shares, tables.last_backward
        parts = self._with_counts(batch, own, self._parts(tables, step, seed))
        self._slowness = 1.0 if self._slow is None else self._slow.at(step, self.program.rank)
        counted = sum(s.samples for s in own.values()) if self.alone else batch.samples
        state = StepState(own, parts, tables, counted)
        watch = self.runner.code.watch
        watch.records = [] if self._has_witness(step, len(own)) else None
        posted = 0
        for index, action in enumerate(self.program.actions):
            if action.microbatch is not None and action.microbatch not in own:
                continue  # a microbatch without samples, skipped by every worker alike
            if action.kind is Kind.REDUCE and not own:
                continue  # this replica, which goes its own way, has no samples of this batch
            if action.kind in _TRAVEL and action not in tables.routes:
                continue  # of these samples nothing goes this way
            try:
                while posted < self._horizon[index]:
                    self._post(self.program.actions[posted], state)
                    posted += 1
                reduces = index == last_backward and self._reduces
                if reduces:
                    self.reducer.arm()
                self._do(action, batch, state, finish)
                if reduces:
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

    def _parts(self, tables: BatchTables, step: int, seed: int) -> dict[int, Part]:
        """What the operators may know of the samples in hand, by microbatch."""
        own, batch = tables.shares, tables.samples
        averaged = sum(share.samples for share in own.values()) if self.alone else batch
        return {i: replace(self._part(share, tables, step, seed), averaged=averaged) for i, share in own.items()}

    def _with_counts(self, batch: Batch, own: Mapping[int, Share], parts: dict[int, Part]) -> dict[int, Part]:
        """The parts with what must be counted over the whole batch before any of them is computed on."""
        replicas = self.program.replicas
        apart = self.alone or self._together or len(replicas) == 1
        if self._counts is None or (apart and len(parts) < 2):  # the part is the whole
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

    def _part(self, share: Share, tables: BatchTables, step: int, seed: int) -> Part:
        """What the operators may know of the samples in hand."""
        if self._together:  # replicas hold the microbatch as one, each its rows of it
            begin, end = bounds(tables.samples, self.microbatches)[share.microbatch]
            return Part(end - begin, begin, tables.samples, share.microbatch, step, seed)
        return Part(
            samples=share.samples,
            first=share.start,
            batch=tables.samples,
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

    def _post(self, action: Action, state: StepState) -> None:
        if action.kind is Kind.RECEIVE and (route := state.tables.routes.get(action)) is not None:
            assert action.value is not None and action.peer is not None
            dtype = self.wires[action.value].dtype
            state.received[action] = self.transport.receive(route.shape, dtype, action.peer)

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
                values[crossing.value] = self._zeros(crossing.value, part.samples, state)
        live = self.runner.forward(i, values, leaves, part)
        if self.anomalies is not None and share.weight and torch.is_grad_enabled():
            program = self.program
            self.anomalies.look(self.runner, program.partition.graph, program.stage, values, leaves, part, live)
        state.outgoing[i] = live.outputs
        if (
            live.loss and share.weight and self._speaks
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
                gradients[crossing.value] = self._zeros(crossing.value, state.parts[i].samples, state)
        state.returned[i] = self.runner.backward(i, gradients, seed)

    def _send(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        value = (state.returned if action.gradient else state.outgoing)[i][name]
        dtype, shape = self.wires[name].dtype, state.tables.shapes[name, state.parts[i].samples]
        if tuple(value.shape) != shape or value.dtype != dtype:
            # Checked here because gloo ends the process when sizes disagree.
            raise RuntimeError(
                f"the value {name} is {value.dtype} {tuple(value.shape)} where capture saw {dtype} {shape}"
            )
        route = state.tables.routes[action]
        value = taken(value.detach(), route.box)
        value = value if route.factor == 1.0 else value * route.factor
        state.sent.setdefault((i, action.peer, action.gradient), []).append(self.transport.send(value, action.peer))
        self.mesh.waits.bytes += value.nbytes

    def _receive(self, action: Action, state: StepState) -> None:
        i, name = action.microbatch, action.value
        assert i is not None and name is not None and action.peer is not None
        value = state.received.pop(action).wait()
        self.mesh.waits.bytes += value.nbytes
        if action.gradient:  # an answer to values that have arrived
            state.left((i, action.peer, False))
        found = (state.gradients if action.gradient else state.values).setdefault(i, {})
        samples = state.parts[i].samples
        if value.shape != state.tables.shapes[name, samples]:
            into = found.pop(name, None)
            into = self._zeros(name, samples, state) if into is None else into
            place(into, state.tables.routes[action].box, value, add=action.gradient or self.relays.summed(name))
            value = into
        found[name] = value if name not in found else found[name] + value

    def _zeros(self, name: str, samples: int, state: StepState) -> Tensor:
        shape = state.tables.shapes[name, samples]
        return torch.zeros(shape, dtype=self.wires[name].dtype, device=self.runner.device)


_TRAVEL = (Kind.SEND, Kind.RECEIVE)


def _horizons(actions: tuple[Action, ...]) -> list[int]:
    """For every action, how far ahead of it receives are posted."""
    compute = [i for i, a in enumerate(actions) if a.kind in (Kind.FORWARD, Kind.BACKWARD)]
    ahead = [bisect_left(compute, index) + LOOKAHEAD for index in range(len(actions))]
    return [compute[i] if i < len(compute) else len(actions) for i in ahead]
