"""The cheapest recomputation within a budget: which values of a stage to keep, by an integer program.

As Checkmate (Jain et al., MLSys 2020) it asks of every value whether it is kept or computed again, with all that
computing it again needs; as full recomputation it keeps what crosses between blocks, so that only one block at a time
is recomputed, and what that needs does not add up.

    a[n] = 1    node n runs again                        costs its seconds
    k[v]        value v is kept                          costs its bytes
    k[v] + a[maker of v] >= 1                            for v that is saved
    k[v] + a[maker of v] >= a[n]                         for v that n reads
    sum of bytes[v] k[v] + own[n] (1 - a[n]) <= budget   own: what n saves besides inputs and results
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from polylane.cost.integer_program import IntegerProgram, Term
from polylane.cost.memory.recompute_choice import SavedValues, drop_by_mode, union_of
from polylane.cost.memory.saved_tensors import Key, SavedTensors
from polylane.errors import PolylaneError
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.partition import Partition
from polylane.plan.recompute import BUDGET, DEFAULT, NONE, RecomputeRule, budget_bytes, nodes_by_key

# A device as good as any to weigh operators against each other: the choice must not depend on the one that computes
# it, since all workers and the simulator must find the same.
FLOPS, BYTES = 1e13, 2e11
OVERHEAD = 2e-6  # seconds of the smallest operator
GAP = 1e-4


class BudgetTooSmall(PolylaneError):
    """A budget that no choice of dropped tensors fits.

    Attributes:
        least_bytes: bytes of the least budget that would do.
    """

    def __init__(self, least_bytes: float, message: str) -> None:
        super().__init__(message)
        self.least = least_bytes

    def __reduce__(self) -> tuple[type[BudgetTooSmall], tuple[float, str]]:
        return BudgetTooSmall, (self.least, str(self))


@dataclass(frozen=True)
class BudgetChoice:
    """The solution for one stage.

    Attributes:
        dropped: what the stage drops.
        kept_bytes: bytes that a microbatch holds between its passes on a rank, values that cross stages included.
    """

    dropped: DroppedTensors
    kept_bytes: float


class StageBudget:
    """The integer program of one stage.

    Args:
        values: what the graph makes and saves on a rank.
        nodes: names of the stage's nodes.
        leaving: names of the nodes whose values other stages read.
    """

    def __init__(self, values: SavedValues, nodes: Collection[str], leaving: Collection[str]) -> None:
        self._values, self._nodes = values, frozenset(nodes)
        graph = values.graph
        self._sent = {key for name in leaving for key in values.values_of.get(name, ())}
        self._inside = {graph.positions[name] for name in nodes}
        outputs = {key for name in graph.outputs for key in values.values_of.get(name, ())}
        self._staying = values.fixed | values.crossing_blocks | self._sent | outputs
        self._program, self._again, self._kept = IntegerProgram(), dict[str, int](), dict[Key, int]()
        self._bytes: list[Term] = []
        self._constant = self._bytes_across() + values.fixed_own(self._nodes)
        for position in sorted(self._inside):
            self._add_node(graph.nodes[position].name)
        for key, at in values.savers.items():
            if key in values.makers and not self._inside.isdisjoint(at) and self._is_own(key):
                self._require(key, 1.0, ())
        for name, variable in self._again.items():
            self._add_reads(name, variable)

    def solve(self, budget: float) -> BudgetChoice | None:
        """Return the cheapest choice whose bytes are within the budget; None if there is none."""
        if self.kept_bytes(NOTHING_DROPPED) <= budget:
            return BudgetChoice(NOTHING_DROPPED, self.kept_bytes(NOTHING_DROPPED))
        rows = self._program.count_rows()
        self._program.add_row(self._bytes, -math.inf, budget - self._constant)
        solution = self._program.solve(GAP)
        self._program.remove_rows(rows)
        return self._read(solution.values) if solution.values is not None and len(solution.values) else None

    def least(self) -> BudgetChoice:
        """Return the choice that keeps the least."""
        return self._read(self._program.solve(GAP, self._bytes, math.inf).values)

    def seconds(self, dropped: DroppedTensors) -> float:
        """Return the seconds of running again what is dropped, on the device that weighs operators."""
        return sum(self._seconds(name) for name in dropped.again)

    def kept_bytes(self, dropped: DroppedTensors) -> float:
        """Return the bytes that a microbatch holds between its passes on a rank."""
        values = self._values
        keys = {key for key, at in values.savers.items() if key in values.makers and not self._inside.isdisjoint(at)}
        keys |= {key for piece in values.pieces(dropped, self._nodes) for key in piece.read}
        keys = {key for key in keys if self._is_own(key) and not self._is_dropped(key, dropped)}
        own_bytes = sum(values.own[name] for name in self._nodes if name not in dropped.again)
        return values.bytes(keys) + own_bytes + values.fixed_own(self._nodes) + self._bytes_across()

    # ---- the program -------------------------------------------------------------------------------------------------

    def _is_own(self, key: Key) -> bool:
        """Return whether a value is made by the stage, and does not leave it."""
        return self._values.makers.get(key) in self._nodes and key not in self._sent

    def _is_dropped(self, key: Key, dropped: DroppedTensors) -> bool:
        return self._values.makers[key] in dropped.values and key not in self._values.fixed

    def _bytes_across(self) -> float:
        """Return the bytes of values that come from other stages or go there, which are held in any case."""
        values = self._values
        read = {
            key
            for name in self._nodes
            for each in values.graph.nodes[values.graph.positions[name]].inputs
            for key in values.values_of.get(each, ())
        }
        received = {key for key in read if key in values.makers and values.makers[key] not in self._nodes}
        return values.bytes(received | self._sent)

    def _can_drop(self, key: Key) -> bool:
        """Return whether a value of the stage may be dropped; a node's results are all dropped, or none."""
        values, maker = self._values, self._values.makers[key]
        keys = [value for value in values.values_of[maker] if values.makers.get(value) == maker]
        return maker in self._again and self._staying.isdisjoint(keys)

    def _add_node(self, name: str) -> None:
        if name not in self._values.repeatable:
            return
        self._again[name] = variable = self._program.add_variable(self._seconds(name), whole=True)
        if own_bytes := self._values.own.get(name):
            self._constant += own_bytes
            self._bytes.append((variable, -own_bytes))

    def _add_reads(self, name: str, variable: int) -> None:
        values = self._values
        inputs = values.graph.nodes[values.graph.positions[name]].inputs
        for key in {key for input_name in inputs for key in values.values_of.get(input_name, ())}:
            if key in values.makers and self._is_own(key) and values.makers[key] != name:
                self._require(key, 0.0, [(variable, -1.0)])

    def _require(self, key: Key, lower: float, extra_terms: Collection[Term]) -> None:
        """Require that a value is kept or computed again: at all, or if a node runs again."""
        if key not in self._kept:
            self._kept[key] = self._program.add_variable()
            self._bytes.append((self._kept[key], self._values.bytes([key])))
        terms = [(self._kept[key], 1.0), *extra_terms]
        if self._can_drop(key):
            terms.append((self._again[self._values.makers[key]], 1.0))
        self._program.add_row(terms, lower, math.inf)

    def _seconds(self, name: str) -> float:
        node = self._values.graph.nodes[self._values.graph.positions[name]]
        touched = {key for node_name in (name, *node.inputs) for key in self._values.values_of.get(node_name, ())}
        moved = self._values.bytes(key for key in touched if key in self._values.makers)
        # A view runs no kernel.
        makes = any(self._values.makers.get(key) == name for key in self._values.values_of.get(name, ()))
        return node.flops / FLOPS + moved / BYTES + OVERHEAD if makes else OVERHEAD / 10

    def _read(self, solution: object) -> BudgetChoice:
        variable_values = [float(x) for x in solution]  # type: ignore[attr-defined]
        repeated_names = [name for name, variable in self._again.items() if variable_values[variable] > 0.5]
        makers = self._values.makers
        # All else that a node makes which runs again is dropped: that is never dearer, whatever the program left open.
        staying = [makers[key] for key in (*self._values.crossing_blocks, *self._sent) if key in makers]
        chosen = self._values.drop(repeated_names, staying)
        dropped = self._values.on_stage(chosen, self._nodes, [makers[key] for key in self._sent], is_best=True)
        return BudgetChoice(dropped, self.kept_bytes(dropped))


def dropped_on_stages(
    partition: Partition, recompute: Sequence[RecomputeRule], keeping: Sequence[SavedTensors], scale: float = 1.0
) -> tuple[DroppedTensors, ...]:
    """Return what the forward passes of every stage drop.

    Args:
        partition: the graph and its cuts into stages.
        recompute: of every stage, what it recomputes: "none", "selective", "full" or "budget:BYTES"; or these by
            module.
        keeping: of every stage, what the graph's operators save on one of its ranks, at the samples of a microbatch.
        scale: factor of budgets, where elements are wider than in the training that they were said for.

    Raises:
        PolylaneError: no choice of dropped tensors fits the budget; it names the least one that would do.
    """
    saved_values = dict[int, SavedValues]()
    for tensors in keeping:
        if id(tensors) not in saved_values:
            saved_values[id(tensors)] = SavedValues(partition.graph, tensors)
    dropped_tensors, refused = list[DroppedTensors](), list[BudgetTooSmall]()
    for stage, mode in enumerate(recompute):
        try:
            dropped_tensors.append(drop_on_stage(saved_values[id(keeping[stage])], partition, stage, mode, scale))
        except BudgetTooSmall as error:
            refused.append(error)
    if refused:  # a budget for all stages must do for the one that needs most
        raise max(refused, key=lambda error: error.least)
    return tuple(dropped_tensors)


def format_least(size: float) -> str:
    """Format bytes as a budget that holds them, rounded up."""
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if size >= factor), _UNITS[-1])
    return f"{math.ceil(size / factor * 100) / 100:g}{unit}"


_UNITS = (("GB", 1e9), ("MB", 1e6), ("KB", 1e3), ("B", 1.0))


def drop_on_stage(
    values: SavedValues, partition: Partition, stage: int, rule: RecomputeRule, scale: float = 1.0
) -> DroppedTensors:
    """Return what the forward passes of one stage drop, at the samples of ``values``.

    A module is recomputed as a stage would be that has its nodes alone: what leaves it is kept.

    Args:
        values: what the graph makes and saves on a rank of the stage.
        partition, stage: the graph's cuts into stages, and the number of the stage.
        rule: what the stage recomputes, as in a plan.
        scale: factor of budgets, where elements are wider than in the training that they were said for.

    Raises:
        PolylaneError: no choice of dropped tensors fits the budget; it names the least one that would do.
    """
    nodes = {node.name for node in partition.nodes(stage)}
    leaving = {crossing.value for crossing in partition.crossings if crossing.producer == stage}
    if isinstance(rule, str):
        modes, parts = {DEFAULT: rule}, {DEFAULT: nodes}
    else:
        modes, parts = {DEFAULT: NONE, **rule}, nodes_by_key(rule, partition.nodes(stage))
    chosen, within_budgets, free = list[DroppedTensors](), list[DroppedTensors](), set[str]()
    for key, part in parts.items():
        budget, out = budget_bytes(modes[key]), values.leaving(part, nodes) | (leaving & part)
        if budget is None:
            chosen.append(values.within(drop_by_mode(values, modes[key]), part, out))
            free |= part
            continue
        program = StageBudget(values, part, out)
        choice = program.solve(budget * scale)
        if choice is None:
            owner = f"stage {stage}" if key == DEFAULT else f"{key} on stage {stage}"
            raise _refuse_budget(owner, modes[key], program.least().kept_bytes / scale)
        within_budgets.append(choice.dropped)
    # The user's own checkpoints may reach over several modules.
    chosen.append(values.within(drop_by_mode(values, NONE), free, values.leaving(free, nodes) | (leaving & free)))
    dropped = union_of(chosen)
    return union_of([values.on_stage(dropped, nodes, leaving) if dropped else dropped, *within_budgets])


def _refuse_budget(owner: str, mode: str, floor: float) -> BudgetTooSmall:
    return BudgetTooSmall(
        floor,
        f"recompute: {owner} needs a budget of {format_least(floor)} at least for what a microbatch keeps between its "
        f"passes, and {mode.removeprefix(BUDGET)} is less: give it that, or use more microbatches",
    )
