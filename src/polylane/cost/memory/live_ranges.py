"""Live ranges: how long every piece of memory of a graph's passes lives, and the peak of any range of nodes.

A forward pass makes values and keeps those that autograd saves; the backward pass visits the nodes in reverse, frees
saved tensors and makes gradients. For any range of nodes (a stage, a block) the bytes alive at every node follow from
the nodes that touch each piece of memory: a few sums over arrays, exact for any cut.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from polylane.cost.memory import intervals
from polylane.cost.memory.backward_steps import BackwardSteps, StageSteps
from polylane.cost.memory.deferred_memory import find_deferred_calls, find_deferred_memory
from polylane.cost.memory.gradient_flow import GradientFlow
from polylane.cost.memory.intervals import Floats, Intervals, Ints, Range
from polylane.cost.memory.recompute_choice import RepeatedPiece
from polylane.cost.memory.saved_tensors import Key, SavedByOperator, SavedTensors
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.graph import Graph


@dataclass(frozen=True)
class PeakMemory:
    """Memory that one microbatch takes on one rank of a stage, in bytes.

    Attributes:
        saved: tensors made in the stage that autograd saves from the forward to the backward pass.
        values_received: values received from other stages, held until the backward pass is over.
        values_sent: values sent to other stages, held until the backward pass is over.
        gradients_received: gradients received from other stages, for values that were sent.
        gradients_sent: gradients sent to other stages, for values that were received.
        forward_peak: most bytes alive in a forward pass, received and sent values included.
        backward_peak: most bytes alive in a backward pass, saved tensors included; gradients of parameters count only
            while they are made.
        first_backward_peak: the same in the first backward pass of a step, where parameters' gradients stay.
        batch_bytes: bytes of the microbatch's input samples.
        between_halves: bytes held between the halves of a backward pass in two: the inputs of the calls whose weight
            gradients are computed later, and the gradients of their results.
        input_half_peak: most bytes alive in the first of these halves.
        weight_half_peak: most bytes alive in the second; gradients of parameters count only while they are made.
    """

    saved: float
    values_received: float
    values_sent: float
    gradients_received: float
    gradients_sent: float
    forward_peak: float
    backward_peak: float
    first_backward_peak: float
    batch_bytes: float
    between_halves: float = 0.0
    input_half_peak: float = 0.0
    weight_half_peak: float = 0.0

    def scaled(self, factor: float) -> PeakMemory:
        """Return the memory for ``factor`` times the samples: all figures are proportional."""
        return PeakMemory(*(factor * getattr(self, field.name) for field in fields(self)))

    @property
    def live_bytes(self) -> float:
        """Bytes that a microbatch holds between its forward and backward pass."""
        return self.saved + self.values_received + self.values_sent


class LiveRanges:
    """Live ranges of all memory of a graph's passes on one rank.

    Args:
        graph: the graph whose passes run.
        keeping: tensors that operators save on one rank, at the samples of its setting.
        dropped: what forward passes drop, to be recomputed in the backward passes.
        repeated_pieces: the pieces of the graph that run again for it (:meth:`.recompute_choice.SavedValues.pieces`).
    """

    def __init__(
        self,
        graph: Graph,
        keeping: SavedTensors,
        dropped: DroppedTensors = NOTHING_DROPPED,
        repeated_pieces: Sequence[RepeatedPiece] = (),
    ) -> None:
        self._graph, self._keeping, self._dropped = graph, keeping, dropped
        self._again = repeated_pieces
        # Pieces of memory are numbered; the lists below have one entry for each.
        self._pieces: dict[Key, int] = {}
        self._sizes: list[int] = []
        self._keys: dict[int, Key] = {}  # of pieces that hold results: the first tensor in each
        self._made: list[int] = []  # position of the node that makes the piece
        # Whether the tensor has a gradient; whether its node is recomputable in any stage (a size, a mask),
        # so that it never crosses a cut.
        self._flows: list[bool] = []
        self._free: list[bool] = []
        self._build()

    # ---- what a stage needs ------------------------------------------------------------------------------------------

    def microbatch_memory(self, pieces: Sequence[Range]) -> PeakMemory:
        """Return the memory of one microbatch on a stage made up of these ranges of nodes, in ascending order."""
        count = sum(end - start for start, end in pieces)
        local = np.full(len(self._graph.nodes) + 1, -1, dtype=np.int64)  # -1: not in the stage
        local[np.concatenate([np.arange(a, b) for a, b in pieces])] = np.arange(count)
        touched, at = self._values.in_ranges(pieces)
        first_nodes, last_nodes = intervals.first_and_last(touched, at, len(self._bytes))
        ids = np.flatnonzero(last_nodes >= 0)  # pieces that the stage touches
        # A piece is own if a node of the stage makes it; it leaves if nodes of other stages read it as well.
        is_own = (local[self._maker[ids]] >= 0) | self._is_free[ids]
        begins = np.where(self._is_free[ids], first_nodes[ids], local[self._maker[ids]])
        touch_counts = np.bincount(touched, minlength=len(self._bytes))[ids]
        leaves = is_own & ~self._is_free[ids] & (touch_counts < self._times[ids])
        size = self._bytes[ids]
        saved = intervals.first_and_last(*self._kept.in_ranges(pieces), len(self._bytes))[0][ids]
        is_saved = saved < intervals.NEVER
        received, sent = float(size[~is_own].sum()), float(size[leaves].sum())
        keeps = intervals.slice_ranges(self._own, pieces)
        stays = is_saved & is_own & ~leaves
        # Forward: own values live from their maker to the last reader; saved and sent ones to the end of the pass.
        ends = np.where(is_saved | leaves, count - 1, last_nodes[ids])
        alive = intervals.alive_bytes(begins[is_own], ends[is_own], size[is_own], count) + np.cumsum(keeps)
        forward = float((alive + intervals.slice_ranges(self._forward, pieces)).max(initial=0.0)) + received
        gradients_received = float(size[leaves & self._flowing[ids]].sum())
        finished = self._finished_gradient_bytes(pieces, count)

        def backward(steps: StageSteps) -> tuple[Floats, dict[int, int]]:
            """Return the bytes at each moment, and the nodes that free saved pieces."""
            # From the last node down: a saved piece is freed after the first node that saved it.
            saved_bytes = steps.alive_until(saved[stays], size[stays]) + steps.alive_until(np.arange(count), keeps)
            recomputed_bytes, workspace, made_again = self._recomputed_bytes(pieces, ids[~is_own | leaves], steps)
            # Where a piece runs again, that comes before the node's own backward pass and the gradients that it makes.
            temporaries = intervals.slice_ranges(self._backward, pieces)[steps.node]
            temporaries = np.where(steps.runs, np.maximum(temporaries, workspace[steps.node] - steps.made), 0.0)
            freed = {**dict(zip(ids[stays], saved[stays], strict=True)), **made_again}
            return saved_bytes + recomputed_bytes + steps.gradients + temporaries, freed

        # Values of the stage's boundary and their received gradients stay for all of the backward pass.
        constant = received + sent + gradients_received
        steps, first_half = (moments.of_stage(pieces, local) for moments in (self._gradients, self._first_half))
        pass_bytes, _ = backward(steps)
        in_half, freed = backward(first_half)
        in_half += self._halves.bytes_kept_longer(pieces, freed, self._bytes, first_half)
        between, later = self._halves.bytes_between(pieces, self._bytes, self._first_half.sizes)
        return PeakMemory(
            saved=float(size[stays].sum() + keeps.sum()),
            values_received=received,
            values_sent=sent,
            gradients_received=gradients_received,
            gradients_sent=float(size[~is_own & self._flowing[ids]].sum()),
            forward_peak=forward,
            backward_peak=float(pass_bytes.max(initial=0.0)) + constant,
            first_backward_peak=float((pass_bytes + finished[steps.node]).max(initial=0.0)) + constant,
            batch_bytes=self._batch_bytes,
            between_halves=between,
            input_half_peak=float(in_half.max(initial=0.0)) + constant,
            weight_half_peak=between + later,
        )

    def _recomputed_bytes(
        self, pieces: Sequence[Range], elsewhere: Ints, steps: StageSteps
    ) -> tuple[Floats, Floats, dict[int, int]]:
        """Return the bytes of recomputed tensors at every moment of a backward pass, and those of making them, by node.

        Beside them the pieces of memory that are made again, each with the first node that saves it.

        A piece runs again when the pass comes to the last node that saves something of it; what it makes is freed
        after the first node that saves it.

        Args:
            pieces: the stage's ranges of nodes.
            elsewhere: memory that is kept all the time, because it crosses between stages.
            steps: moments of the stage's backward pass.
        """
        workspace: Floats = np.zeros(len(steps.over))
        touched, at = self._asked.in_ranges(pieces)
        if not len(touched):
            return np.zeros(len(steps.node)), workspace, {}
        size = self._bytes.copy()
        size[elsewhere] = 0.0
        begins = np.full(len(self._again), -1, dtype=np.int64)
        np.maximum.at(begins, self._piece_of[touched], at)
        first_nodes, last_nodes = intervals.first_and_last(touched, at, len(self._bytes))
        ids = np.flatnonzero(last_nodes >= 0)
        recomputed_bytes = steps.alive_between(first_nodes[ids], begins[self._piece_of[ids]], size[ids])
        runs = begins >= 0
        np.maximum.at(workspace, begins[runs], self._workspace[runs])
        crossing = set(elsewhere.tolist())
        return recomputed_bytes, workspace, {int(p): int(first_nodes[p]) for p in ids if int(p) not in crossing}

    def _finished_gradient_bytes(self, pieces: Sequence[Range], count: int) -> Floats:
        """Return the bytes of parameter gradients that exist before the backward pass of every node."""
        touched, at = self._parameters.in_ranges(pieces)
        first_nodes, last_nodes = intervals.first_and_last(touched, at, len(self._trained_bytes))
        ids = np.flatnonzero(last_nodes >= 0)
        finished_bytes = np.bincount(first_nodes[ids], self._trained_bytes[ids], count + 1)
        return np.asarray(np.cumsum(finished_bytes[::-1])[::-1][1:], dtype=np.float64)

    # ---- building ----------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        nodes = self._graph.nodes
        values, kept_pieces = [list[int]() for _ in nodes], [list[int]() for _ in nodes]
        self._own: Floats = np.zeros(len(nodes))
        self._forward: Floats = np.zeros(len(nodes))
        self._backward: Floats = np.zeros(len(nodes))
        piece_numbers, asked_pieces = (
            {name: number for number, repeated_piece in enumerate(self._again) for name in repeated_piece.names},
            [list[int]() for _ in nodes],
        )
        groups: dict[int, int] = {}  # dropped memory -> number of the piece that makes it again
        for operator, saved in self._keeping.nodes.items():
            i, name = saved.at, nodes[saved.at].name
            repeats = name in self._dropped.again and operator in self._keeping.repeatable
            output_pieces = [
                self._output_piece(key, i, nodes[i].recomputable)
                for key in saved.output_keys
                if key in self._keeping.forms
            ]
            values[i] += [p for p in (*map(self._memory_piece, saved.input_keys), *output_pieces) if p is not None]
            if not repeats:
                self._own[i] += saved.own_bytes
            elif saved.own_bytes:  # memory of its own, which is made again
                own_piece = self._add_memory(saved.own_bytes, i)
                asked_pieces[i].append(own_piece)
                groups[own_piece] = piece_numbers[name]
            for piece in (p for p in map(self._memory_piece, saved.keys) if p is not None):
                maker = nodes[self._made[piece]].name
                if maker in self._dropped.values and self._keys[piece][0] in self._keeping.repeatable:
                    asked_pieces[i].append(piece)
                    groups[piece] = piece_numbers[maker]
                else:
                    kept_pieces[i].append(piece)
            gradient_bytes = sum(origin.new_bytes for origin in saved.trial.gradient_origins if origin is not None)
            peak = saved.trial.forward_peak
            if repeats:  # where the result is kept, the rest is dropped after the operator
                peak = saved.trial.dropping_peak if name in self._dropped.values else peak + saved.own_bytes
            self._forward[i] = max(self._forward[i], peak)
            self._backward[i] = max(self._backward[i], saved.trial.backward - gradient_bytes)
        for each_piece, begin in zip(self._again, self._last_asked(groups, asked_pieces), strict=True):
            # What a piece reads is kept until it runs again.
            kept_pieces[begin] += [p for p in map(self._memory_piece, each_piece.read) if p is not None]
        self._asked, self._workspace = Intervals.from_nodes(asked_pieces), self._find_workspace(groups)
        self._piece_of: Ints = np.full(len(self._sizes), -1, dtype=np.int64)
        for memory, number in groups.items():
            self._piece_of[memory] = number
        self._values, self._kept = Intervals.from_nodes(values), Intervals.from_nodes(kept_pieces)
        self._bytes: Floats = np.array(self._sizes, dtype=np.float64)
        self._maker: Ints = np.array(self._made, dtype=np.int64)
        self._flowing, self._is_free = np.array(self._flows, dtype=bool), np.array(self._free, dtype=bool)
        self._times = np.bincount(self._values.piece, minlength=len(self._bytes))
        self._gradients, _ = self._build_gradients()
        calls = find_deferred_calls(self._graph, self._keeping)
        self._first_half, results = self._build_gradients({call.name: call.later for call in calls})
        self._halves = find_deferred_memory(self._graph, calls, self._keeping, self._memory_piece, results)
        self._build_parameters()
        forms = self._keeping.forms
        self._batch_bytes = float(sum(form.bytes for key, form in forms.items() if key[0].startswith("input:")))

    def _last_asked(self, groups: Mapping[int, int], asked_pieces: Sequence[Sequence[int]]) -> list[int]:
        """Return for every piece that runs again the last node that saves something of it."""
        positions = [0] * len(self._again)
        for position, memory in enumerate(asked_pieces):
            for memory_piece in memory:
                positions[groups[memory_piece]] = position
        return positions

    def _find_workspace(self, groups: Mapping[int, int]) -> Floats:
        """Return for every piece the bytes alive at most while it runs again, beyond all that it makes for autograd."""
        workspace: Floats = np.zeros(len(self._again))
        nodes, makes = self._graph.nodes, defaultdict[int, list[int]](list)
        operators = defaultdict[int, list[SavedByOperator]](list)
        for memory, position in enumerate(self._made):
            makes[position].append(memory)
        for operator in self._keeping.nodes.values():
            operators[operator.at].append(operator)
        for number, piece in enumerate(self._again):
            order = sorted(self._graph.positions[name] for name in piece.names)
            last_nodes: dict[int, int] = {}
            for i in order:
                for operator in operators[i]:
                    last_nodes |= dict.fromkeys(self._touched_by(operator), i)
            alive = saved = 0.0
            for i in order:
                alive += sum(self._sizes[p] for p in makes[i] if p not in groups)
                saved += sum(self._sizes[p] for p in makes[i] if p in groups)
                peak = max((operator.trial.forward_peak for operator in operators[i]), default=0)
                workspace[number] = max(workspace[number], alive + saved + peak)
                alive -= sum(
                    self._sizes[p]
                    for p, end in last_nodes.items()
                    if end == i and p not in groups and nodes[self._made[p]].name in piece.names
                )
            workspace[number] = max(workspace[number] - saved, 0.0)
        return workspace

    def _touched_by(self, saved: SavedByOperator) -> list[int]:
        """Return the pieces of memory that an operator's inputs and outputs occupy."""
        keys = (key for key in (*saved.output_keys, *saved.input_keys) if key in self._keeping.storage_of)
        return [piece for piece in map(self._memory_piece, keys) if piece is not None]

    def _add_memory(self, size: int, position: int, flows: bool = False, free: bool = False) -> int:
        """Number a piece of memory that the node at a position makes."""
        self._sizes.append(size)
        self._made.append(position)
        self._flows.append(flows)
        self._free.append(free)
        return len(self._sizes) - 1

    def _memory_piece(self, key: Key) -> int | None:
        """Return the piece of memory of a tensor; None for parameters and inputs, which count elsewhere."""
        return self._pieces.get(self._keeping.storage_of[key])

    def _output_piece(self, key: Key, position: int, free: bool) -> int | None:
        """Return the piece of an operator's output: a new one, unless the output is a view of another tensor."""
        if self._keeping.storage_of[key] == key:
            size, flows = self._keeping.storage_bytes[key], self._keeping.forms[key].gradient
            self._pieces[key] = self._add_memory(size, position, flows, free)
            self._keys[self._pieces[key]] = key
        return self._memory_piece(key)

    # ---- gradients ---------------------------------------------------------------------------------------------------

    def _build_gradients(
        self, later: Mapping[str, Collection[Key]] | None = None
    ) -> tuple[BackwardSteps, Mapping[int, Sequence[int]]]:
        """Play a backward pass over the whole graph; return which gradient memory is touched at its moments.

        Beside it for every node the gradient pieces of its results.

        Args:
            later: by operator the inputs whose gradients are computed later.
        """
        flow = GradientFlow(later)
        if self._keeping.loss_key is not None:
            flow.start_from_loss(self._keeping.loss_key)
        for name, saved in reversed(list(self._keeping.nodes.items())):
            flow.run_backward_of(name, saved, self._keeping.forms)
        return BackwardSteps(flow, len(self._graph.nodes)), flow.result_pieces

    def _build_parameters(self) -> None:
        names = {name: i for i, name in enumerate(self._graph.parameters)}
        self._parameters = Intervals.from_nodes([[names[p] for p in node.parameters] for node in self._graph.nodes])
        self._trained_bytes: Floats = np.zeros(len(names))
        for name, i in names.items():
            info = self._graph.parameters[name]
            if info.trainable:
                self._trained_bytes[i] = self._keeping.storage_bytes.get((f"parameter:{name}", 0), info.bytes)
