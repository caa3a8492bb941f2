"""The integer program of a choice: what is chosen, what flows, what is limited; see solve.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import OperatorNode, TensorKey
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands
from polylane.sharding.cost_model import (
    CostSetting,
    TensorUse,
    activation_bytes,
    copied_bytes,
    is_parameter,
    parameter_bytes,
    price_operator,
    price_redistribution,
    price_source,
)
from polylane.sharding.integer_program import IntegerProgram, Term


def choice_labels(setting: CostSetting, choices: StrategyOptions) -> dict[str, Hashable]:
    """What must be equal for two nodes to be chosen for together: what may be chosen, and what it costs."""
    labels: dict[str, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    known: dict[int, int] = {}  # by identity: operators that are alike mostly have the same object
    for step in setting.view.operators:
        own = choices.strategies[step.name]
        if id(own) not in known:
            offered = tuple((s.inputs, s.outputs, s.share, s.sent, s.messages) for s in own)
            known[id(own)] = numbers.setdefault(offered, len(numbers))
        offer = known[id(own)]
        elsewhere = tuple(
            (s.strategies[step.name].inputs, s.strategies[step.name].outputs) for s in setting.other_axes.values()
        )
        call = step.call
        labels[step.name] = (call.op, call.inputs, call.outputs, call.written_inputs, step.flops, offer, elsewhere)
    for key, source in setting.view.sources.items():
        elsewhere_source = tuple(s.source_placements.get(key) for s in setting.other_axes.values())
        labels[key[0]] = (source.role[0], source.value, choices.source_placements[key], elsewhere_source)
    return labels


# How one reader of a tensor chooses: placement -> the variables of which one is 1 where the tensor is needed so.
Marginal = Mapping[Placement, Sequence[int]]
# The variable that bears the price of a move from a kind of placement to a placement.
Paid = dict[tuple[Hashable, Placement], int]


@dataclass
class ProgramBuilder:
    """Writes the program, class by class, and reads its solution.

    Attributes:
        setting, choices, demands: what is asked.
        classes: the class of every step and source by name.
        program: what is written.
        variables: of every class, one for each of its choices.
        limited_terms: the bytes that the purpose makes small, as a sum over variables.
    """

    setting: CostSetting
    choices: StrategyOptions
    demands: SplitDemands
    classes: Mapping[str, int]
    program: IntegerProgram = field(default_factory=IntegerProgram)
    variables: dict[int, list[int]] = field(default_factory=dict)
    limited_terms: list[Term] = field(default_factory=list)

    def build(self) -> None:
        """All variables and rows."""
        members = Counter(self.classes.values())
        for step in self.setting.view.operators:
            self._add_operator(step.name, members)
        for key in self.setting.view.sources:
            self._add_source(key, members)
        one = self.program.add_variable(whole=True, lowest=1.0)
        for key, uses, times in self._distinct_values():
            self._add_value(key, uses, times, one)

    def read_solution(self, values: Sequence[float]) -> AxisSplit:
        """The split that a solution says."""
        best = {
            colour: max(range(len(own)), key=lambda i, own=own: values[own[i]])  # type: ignore[misc]
            for colour, own in self.variables.items()
        }
        steps = {name: every[best[self.classes[name]]] for name, every in self.choices.strategies.items()}
        sources = {key: every[best[self.classes[key[0]]]] for key, every in self.choices.source_placements.items()}
        return AxisSplit(self.setting.degree, steps, sources)

    # ---- what is chosen ----------------------------------------------------------------------------------------------

    def _add_operator(self, name: str, members: Counter[int]) -> None:
        colour = self.classes[name]
        if colour in self.variables:
            return
        times, step = members[colour], self._operators[name]
        own, bytes_each = [], []
        for strategy in self.choices.strategies[name]:
            cost = price_operator(self.setting, step, strategy).seconds
            own.append(self.program.add_variable(cost * times, whole=True))
            bytes_each.append(activation_bytes(self.setting, step, strategy.outputs) * times)
        self._add_choice(colour, own, None if self.demands.purpose == "tensor" else bytes_each)

    def _add_source(self, key: TensorKey, members: Counter[int]) -> None:
        colour = self.classes[key[0]]
        if colour in self.variables:
            return
        times, source = members[colour], self.setting.view.sources[key]
        own, bytes_each = [], []
        for placement in self.choices.source_placements[key]:
            cost = price_source(self.setting, source, placement).seconds
            own.append(self.program.add_variable(cost * times, whole=True))
            bytes_each.append(parameter_bytes(self.setting, source, placement) * times)
        self._add_choice(colour, own, bytes_each if self.demands.purpose == "tensor" else None)

    def _add_choice(self, colour: int, own: list[int], limited: list[float] | None) -> None:
        self.variables[colour] = own
        self.program.add_row([(v, 1.0) for v in own], 1.0, 1.0)
        if limited is not None:
            self.limited_terms += zip(own, limited, strict=True)

    @cached_property
    def _operators(self) -> Mapping[str, OperatorNode]:
        return {step.name: step for step in self.setting.view.operators}

    # ---- what flows --------------------------------------------------------------------------------------------------

    def _distinct_values(self) -> list[tuple[TensorKey, list[TensorUse], int]]:
        """One tensor of every kind, its readers (one of every kind), and how many tensors are alike."""
        kinds: dict[Hashable, tuple[TensorKey, list[TensorUse], int]] = {}
        for key, uses in self.setting.uses.items():
            distinct = {(self._class_of(use), use.index, use.is_write): use for use in uses}
            kind = (self.classes[key[0]], key[1], frozenset(distinct))
            first, readers, times = kinds.get(kind, (key, list(distinct.values()), 0))
            kinds[kind] = first, readers, times + 1
        return list(kinds.values())

    def _class_of(self, use: TensorUse) -> int:
        return -1 if use.step is None else self.classes[use.step.name]

    def _add_value(self, key: TensorKey, uses: Sequence[TensorUse], times: int, one: int) -> None:
        made = self._made_marginal(key)
        reads = [self._read_marginal(use, one) for use in uses]
        for use, read in zip(uses, reads, strict=True):
            self._forbid_swaps(key, use, made, read)
        users = Counter(target for use, read in zip(uses, reads, strict=True) if not use.is_write for target in read)
        paid: Paid = {}
        for use, read in zip(uses, reads, strict=True):
            if use.is_write:
                for placement in {**made, **read}:
                    here = [(v, 1.0) for v in made.get(placement, ())]
                    self.program.add_row([*here, *((v, -1.0) for v in read.get(placement, ()))], 0.0, 0.0)
            else:
                self._add_flow(key, made, read, times, users, paid)

    def _made_marginal(self, key: TensorKey) -> Marginal:
        own = self.variables[self.classes[key[0]]]
        if key in self.choices.source_placements:
            return {placement: [v] for v, placement in zip(own, self.choices.source_placements[key], strict=True)}
        return _placement_marginal(own, [s.outputs[key[1]] for s in self.choices.strategies[key[0]]])

    def _read_marginal(self, use: TensorUse, one: int) -> Marginal:
        if use.step is None:
            return {REPLICATE: [one]}
        strategies = self.choices.strategies[use.step.name]
        return _placement_marginal(
            self.variables[self.classes[use.step.name]], [s.inputs[use.index] for s in strategies]
        )

    def _add_flow(
        self,
        key: TensorKey,
        made: Marginal,
        read: Marginal,
        times: int,
        users: Counter[Placement],
        paid: Paid,
    ) -> None:
        """One tensor to one reader: as much flows out of every placement as is made in it, and in as is needed.

        All moves of one kind (from any Shard, say) to a placement cost alike, so they are one flow.
        """
        kinds: dict[Hashable, list[Placement]] = {}
        for placement in made:
            kinds.setdefault("shard" if isinstance(placement, Shard) else placement, []).append(placement)
        straight = {p: self.program.add_variable() for p in made if p in read}
        arriving: dict[Placement, list[int]] = {t: [straight[t]] if t in straight else [] for t in read}
        for kind, placements in kinds.items():
            leaving = [straight[p] for p in placements if p in straight]
            for target in read:
                start = next((p for p in placements if p != target), None)
                if start is not None:
                    cost = price_redistribution(self.setting, key, start, target).seconds * times
                    size = copied_bytes(self.setting, key, start, target) * times if self._is_limited(key) else 0.0
                    flow = self._add_redistribution(cost, size, users[target], kind, target, paid)
                    leaving.append(flow)
                    arriving[target].append(flow)
            out = [(v, 1.0) for p in placements for v in made[p]]
            self.program.add_row([*out, *((v, -1.0) for v in leaving)], 0.0, 0.0)
            if len(placements) > 1:
                for p in placements:
                    if p in straight:
                        self.program.add_row([(straight[p], 1.0), *((v, -1.0) for v in made[p])], -1.0, 0.0)
        for target, flows in arriving.items():
            self.program.add_row([*((v, 1.0) for v in read[target]), *((v, -1.0) for v in flows)], 0.0, 0.0)

    def _is_limited(self, key: TensorKey) -> bool:
        """Whether what moves make of a tensor is among what the purpose makes small."""
        if self.demands.purpose == "tensor":
            return is_parameter(self.setting, key)
        return self.setting.values[key].gradient and not is_parameter(self.setting, key)

    def _add_redistribution(
        self, cost: float, size: float, users: int, kind: Hashable, target: Placement, paid: Paid
    ) -> int:
        """The flow of a move to one reader; where several readers may need it, they pay once."""
        flow = self.program.add_variable(cost if users < 2 else 0.0)
        payer = flow
        if users > 1 and (cost or size):
            payer = paid.get((kind, target), -1)
            if payer < 0:
                payer = paid[kind, target] = self.program.add_variable(cost)
                self.limited_terms += [(payer, size)] if size else []
            self.program.add_row([(flow, 1.0), (payer, -1.0)], -1.0, 0.0)
        elif size:
            self.limited_terms.append((flow, size))
        return flow

    def _forbid_swaps(self, key: TensorKey, use: TensorUse, made: Marginal, read: Marginal) -> None:
        """Two axes cannot swap their dimensions of a tensor: neither could go first."""
        for split in self.demands.other_axes.values():
            have = split.placement(key)
            then = REPLICATE if use.step is None else split.strategies[use.step.name].inputs[use.index]
            if have != then and isinstance(have, Shard) and isinstance(then, Shard):
                sources = [v for p in made if isinstance(p, Shard) and p.dim == then.dim for v in made[p]]
                targets = [v for p in read if isinstance(p, Shard) and p.dim == have.dim for v in read[p]]
                if sources and targets:
                    self.program.add_row([(v, 1.0) for v in (*sources, *targets)], 0.0, 1.0)


def _placement_marginal(own: Sequence[int], placements: Sequence[Placement]) -> Marginal:
    found: dict[Placement, list[int]] = {}
    for variable, placement in zip(own, placements, strict=True):
        found.setdefault(placement, []).append(variable)
    return found
