"""The integer program of a choice: what is chosen, what flows, what is limited; see solve.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polylane.placement.options import Options
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.rewrite import Split
from polylane.placement.view import Key, Step
from polylane.planner.allowed import Demands
from polylane.planner.price import (
    Setting,
    Use,
    activation_bytes,
    copied_bytes,
    is_parameter,
    parameter_bytes,
    price_of_move,
    price_of_source,
    price_of_step,
)
from polylane.planner.program import Program, Term


def labels_of(setting: Setting, choices: Options) -> dict[str, Hashable]:
    """What must be equal for two nodes to be chosen for together: what may be chosen, and what it costs."""
    labels: dict[str, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    known: dict[int, int] = {}  # by identity: operators that are alike mostly have the same object
    for step in setting.view.steps:
        own = choices.steps[step.name]
        if id(own) not in known:
            offered = tuple((s.inputs, s.outputs, s.share, s.sent, s.messages) for s in own)
            known[id(own)] = numbers.setdefault(offered, len(numbers))
        offer = known[id(own)]
        elsewhere = tuple((s.steps[step.name].inputs, s.steps[step.name].outputs) for s in setting.taken.values())
        call = step.call
        labels[step.name] = (call.op, call.inputs, call.outputs, call.written, step.flops, offer, elsewhere)
    for key, source in setting.view.sources.items():
        elsewhere_source = tuple(s.sources.get(key) for s in setting.taken.values())
        labels[key[0]] = (source.role[0], source.value, choices.sources[key], elsewhere_source)
    return labels


# How one reader of a tensor chooses: placement -> the variables of which one is 1 where the tensor is needed so.
Marginal = Mapping[Placement, Sequence[int]]
# The variable that bears the price of a move from a kind of placement to a placement.
Paid = dict[tuple[Hashable, Placement], int]


@dataclass
class Builder:
    """Writes the program, class by class, and reads its solution.

    Attributes:
        setting, choices, demands: what is asked.
        colours: the class of every step and source by name.
        program: what is written.
        variables: of every class, one for each of its choices.
        limited: the bytes that the purpose makes small, as a sum over variables.
    """

    setting: Setting
    choices: Options
    demands: Demands
    colours: Mapping[str, int]
    program: Program = field(default_factory=Program)
    variables: dict[int, list[int]] = field(default_factory=dict)
    limited: list[Term] = field(default_factory=list)

    def build(self) -> None:
        """All variables and rows."""
        members = Counter(self.colours.values())
        for step in self.setting.view.steps:
            self._step(step.name, members)
        for key in self.setting.view.sources:
            self._source(key, members)
        one = self.program.variable(whole=True, lowest=1.0)
        for key, uses, times in self._values():
            self._value(key, uses, times, one)

    def read(self, values: Sequence[float]) -> Split:
        """The split that a solution says."""
        best = {
            colour: max(range(len(own)), key=lambda i, own=own: values[own[i]])  # type: ignore[misc]
            for colour, own in self.variables.items()
        }
        steps = {name: every[best[self.colours[name]]] for name, every in self.choices.steps.items()}
        sources = {key: every[best[self.colours[key[0]]]] for key, every in self.choices.sources.items()}
        return Split(self.setting.degree, steps, sources)

    # ---- what is chosen ----------------------------------------------------------------------------------------------

    def _step(self, name: str, members: Counter[int]) -> None:
        colour = self.colours[name]
        if colour in self.variables:
            return
        times, step = members[colour], self._steps[name]
        own, bytes_each = [], []
        for strategy in self.choices.steps[name]:
            cost = price_of_step(self.setting, step, strategy).seconds
            own.append(self.program.variable(cost * times, whole=True))
            bytes_each.append(activation_bytes(self.setting, step, strategy.outputs) * times)
        self._chosen(colour, own, None if self.demands.purpose == "tensor" else bytes_each)

    def _source(self, key: Key, members: Counter[int]) -> None:
        colour = self.colours[key[0]]
        if colour in self.variables:
            return
        times, source = members[colour], self.setting.view.sources[key]
        own, bytes_each = [], []
        for placement in self.choices.sources[key]:
            cost = price_of_source(self.setting, source, placement).seconds
            own.append(self.program.variable(cost * times, whole=True))
            bytes_each.append(parameter_bytes(self.setting, source, placement) * times)
        self._chosen(colour, own, bytes_each if self.demands.purpose == "tensor" else None)

    def _chosen(self, colour: int, own: list[int], limited: list[float] | None) -> None:
        self.variables[colour] = own
        self.program.row([(v, 1.0) for v in own], 1.0, 1.0)
        if limited is not None:
            self.limited += zip(own, limited, strict=True)

    @cached_property
    def _steps(self) -> Mapping[str, Step]:
        return {step.name: step for step in self.setting.view.steps}

    # ---- what flows --------------------------------------------------------------------------------------------------

    def _values(self) -> list[tuple[Key, list[Use], int]]:
        """One tensor of every kind, its readers (one of every kind), and how many tensors are alike."""
        kinds: dict[Hashable, tuple[Key, list[Use], int]] = {}
        for key, uses in self.setting.uses.items():
            distinct = {(self._colour(use), use.index, use.exact): use for use in uses}
            kind = (self.colours[key[0]], key[1], frozenset(distinct))
            first, readers, times = kinds.get(kind, (key, list(distinct.values()), 0))
            kinds[kind] = first, readers, times + 1
        return list(kinds.values())

    def _colour(self, use: Use) -> int:
        return -1 if use.step is None else self.colours[use.step.name]

    def _value(self, key: Key, uses: Sequence[Use], times: int, one: int) -> None:
        made = self._made(key)
        reads = [self._read(use, one) for use in uses]
        for use, read in zip(uses, reads, strict=True):
            self._apart(key, use, made, read)
        users = Counter(target for use, read in zip(uses, reads, strict=True) if not use.exact for target in read)
        paid: Paid = {}
        for use, read in zip(uses, reads, strict=True):
            if use.exact:
                for placement in {**made, **read}:
                    here = [(v, 1.0) for v in made.get(placement, ())]
                    self.program.row([*here, *((v, -1.0) for v in read.get(placement, ()))], 0.0, 0.0)
            else:
                self._flow(key, made, read, times, users, paid)

    def _made(self, key: Key) -> Marginal:
        own = self.variables[self.colours[key[0]]]
        if key in self.choices.sources:
            return {placement: [v] for v, placement in zip(own, self.choices.sources[key], strict=True)}
        return _marginal(own, [s.outputs[key[1]] for s in self.choices.steps[key[0]]])

    def _read(self, use: Use, one: int) -> Marginal:
        if use.step is None:
            return {REPLICATE: [one]}
        strategies = self.choices.steps[use.step.name]
        return _marginal(self.variables[self.colours[use.step.name]], [s.inputs[use.index] for s in strategies])

    def _flow(
        self,
        key: Key,
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
        straight = {p: self.program.variable() for p in made if p in read}
        arriving: dict[Placement, list[int]] = {t: [straight[t]] if t in straight else [] for t in read}
        for kind, placements in kinds.items():
            leaving = [straight[p] for p in placements if p in straight]
            for target in read:
                start = next((p for p in placements if p != target), None)
                if start is not None:
                    cost = price_of_move(self.setting, key, start, target).seconds * times
                    size = copied_bytes(self.setting, key, start, target) * times if self._limits(key) else 0.0
                    flow = self._move(cost, size, users[target], kind, target, paid)
                    leaving.append(flow)
                    arriving[target].append(flow)
            out = [(v, 1.0) for p in placements for v in made[p]]
            self.program.row([*out, *((v, -1.0) for v in leaving)], 0.0, 0.0)
            if len(placements) > 1:
                for p in placements:
                    if p in straight:
                        self.program.row([(straight[p], 1.0), *((v, -1.0) for v in made[p])], -1.0, 0.0)
        for target, flows in arriving.items():
            self.program.row([*((v, 1.0) for v in read[target]), *((v, -1.0) for v in flows)], 0.0, 0.0)

    def _limits(self, key: Key) -> bool:
        """Whether what moves make of a tensor is among what the purpose makes small."""
        if self.demands.purpose == "tensor":
            return is_parameter(self.setting, key)
        return self.setting.values[key].gradient and not is_parameter(self.setting, key)

    def _move(self, cost: float, size: float, users: int, kind: Hashable, target: Placement, paid: Paid) -> int:
        """The flow of a move to one reader; where several readers may need it, they pay once."""
        flow = self.program.variable(cost if users < 2 else 0.0)
        payer = flow
        if users > 1 and (cost or size):
            payer = paid.get((kind, target), -1)
            if payer < 0:
                payer = paid[kind, target] = self.program.variable(cost)
                self.limited += [(payer, size)] if size else []
            self.program.row([(flow, 1.0), (payer, -1.0)], -1.0, 0.0)
        elif size:
            self.limited.append((flow, size))
        return flow

    def _apart(self, key: Key, use: Use, made: Marginal, read: Marginal) -> None:
        """Two axes cannot swap their dimensions of a tensor: neither could go first."""
        for split in self.demands.taken.values():
            have = split.placement(key)
            then = REPLICATE if use.step is None else split.steps[use.step.name].inputs[use.index]
            if have != then and isinstance(have, Shard) and isinstance(then, Shard):
                sources = [v for p in made if isinstance(p, Shard) and p.dim == then.dim for v in made[p]]
                targets = [v for p in read if isinstance(p, Shard) and p.dim == have.dim for v in read[p]]
                if sources and targets:
                    self.program.row([(v, 1.0) for v in (*sources, *targets)], 0.0, 1.0)


def _marginal(own: Sequence[int], placements: Sequence[Placement]) -> Marginal:
    found: dict[Placement, list[int]] = {}
    for variable, placement in zip(own, placements, strict=True):
        found.setdefault(placement, []).append(variable)
    return found
