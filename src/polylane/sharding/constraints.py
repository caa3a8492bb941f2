"""The integer linear program of one mesh axis: variables, objective and constraints, built class by class.

Indices: c, a class of equivalent operators or graph inputs, n[c] members; i, a choice of a class (a strategy, or a
placement of a graph input); v, a tensor, n[v] alike; u, a reader of v; p and q, placements; k, a kind of source
placement (all Shards are one kind: moves from any of them to q cost the same; every other placement is its own kind).

Variables
    x[c,i] in {0, 1}       class c takes choice i
    s[u,p] in [0, 1]       v is made in p and reader u reads it in p: no redistribution
    f[u,k,q] in [0, 1]     v is made in a placement of kind k and redistributed to q for reader u
    y[v,k,q] in [0, 1]     the redistribution k -> q of v is paid for; where at most one reader can ask for q, f itself

Abbreviations: placements of producer and reader as sums of choices
    made[v,p]  =  sum of x[c,i] over the choices i of v's producer c that give v in p
    read[u,q]  =  sum of x[c,i] over the choices i of reader u's class c that need v in q; a graph output: Replicate

Objective: minimise  T + w B,  w = 0, a price of bytes, or infinite (solve.py searches it)
    T [s]    =  sum n[c] seconds[c,i] x[c,i]  +  sum n[v] seconds[v,k,q] y[v,k,q]
    B [byte] =  sum n[c] bytes[c,i] x[c,i]    +  sum n[v] bytes[v,k,q] y[v,k,q]
                (parameters on an axis "tensor", activations on the others)

Constraints
    sum over i of x[c,i]  =  1                                                  for every c: one choice
    sum over p in k of made[v,p]  =  sum over p in k of s[u,p]  +  sum over q of f[u,k,q]      for every u, k: leaving
    read[u,q]  =  s[u,q]  +  sum over k of f[u,k,q]                             for every u, q: arriving
    s[u,p]  <=  made[v,p]                                                       where p's kind has several placements
    f[u,k,q]  <=  y[v,k,q]                                                      paid once for all readers
    made[v,p]  =  read[u,p]                                                     where u writes v in place
    made[v, Shard(b)]  +  read[u, Shard(a)]  <=  1                              where another axis takes v from a to b

The flows s and f make the linear relaxation tight: given whole x, whole values of s, f and y are optimal, so that only
x is declared integer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from polylane.cost.integer_program import IntegerProgram, Term
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import TensorKey
from polylane.placement.placement import REPLICATE, Placement, Shard
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands
from polylane.sharding.cost_model import CostSetting, TensorUse, needed_placement


def choice_labels(setting: CostSetting, choices: StrategyOptions) -> dict[str, Hashable]:
    """Return what must be equal for two nodes to share one choice: their alternatives, and what these cost."""
    labels: dict[str, Hashable] = {}
    numbers: dict[Hashable, int] = {}
    offer_numbers: dict[int, int] = {}  # by identity: operators that are alike mostly have the same object
    for step in setting.view.operators:
        strategies = choices.strategies[step.name]
        if id(strategies) not in offer_numbers:
            offered = tuple((s.inputs, s.outputs, s.share, s.sent, s.messages) for s in strategies)
            offer_numbers[id(strategies)] = numbers.setdefault(offered, len(numbers))
        offer = offer_numbers[id(strategies)]
        elsewhere = tuple(
            (s.strategies[step.name].inputs, s.strategies[step.name].outputs) for s in setting.other_axes.values()
        )
        call = step.call
        labels[step.name] = (call.op, call.inputs, call.outputs, call.written_inputs, step.flops, offer, elsewhere)
    for key, source in setting.view.sources.items():
        elsewhere_source = tuple(s.source_placements.get(key) for s in setting.other_axes.values())
        labels[key[0]] = (source.role[0], source.value, choices.source_placements[key], elsewhere_source)
    return labels


# How one reader needs, or a producer makes, a tensor: placement -> the variables x that sum to made[v,p] or read[u,p].
Marginal = Mapping[Placement, Sequence[int]]
# The variable that bears the price of a redistribution from a kind of placement to a placement: y in the header.
Paid = dict[tuple[Hashable, Placement], int]


@dataclass
class ProgramBuilder:
    """Writes the integer program, class by class, and reads its solution.

    Attributes:
        setting, choices, demands: the graph with its prices, the admissible strategies, the axis's conditions.
        classes: the number of every operator's and graph input's class, by node name.
        program: the integer program that :meth:`build` fills.
        variables: indices into the program's variables by class, one for each choice of that class.
        limited_terms: the bytes B that the purpose makes small, as (variable, bytes) terms.
    """

    setting: CostSetting
    choices: StrategyOptions
    demands: SplitDemands
    classes: Mapping[str, int]
    program: IntegerProgram = field(default_factory=IntegerProgram)
    variables: dict[int, list[int]] = field(default_factory=dict)
    limited_terms: list[Term] = field(default_factory=list)

    def build(self) -> None:
        """Add all variables and constraints to the program."""
        setting = self.setting
        # Along "tensor" the bytes of parameters are made small, elsewhere those of activations.
        limits_parameters = self.demands.purpose == "tensor"
        for step in setting.view.operators:
            if self.classes[step.name] not in self.variables:
                offered = self.choices.strategies[step.name]
                seconds = [setting.operator_seconds(step, s) for s in offered]
                sizes = None if limits_parameters else [setting.activation_bytes(step, s.outputs) for s in offered]
                self._add_choice(step.name, seconds, sizes)
        for key, source in setting.view.sources.items():
            if self.classes[key[0]] not in self.variables:
                placements = self.choices.source_placements[key]
                seconds = [setting.source_seconds(source, p) for p in placements]
                sizes = [setting.parameter_bytes(source, p) for p in placements] if limits_parameters else None
                self._add_choice(key[0], seconds, sizes)
        # A variable fixed at 1 stands for the placement of graph outputs, which are always whole.
        constant = self.program.add_variable(whole=True, lowest=1.0)
        for key, uses, times in self._distinct_values():
            self._add_value(key, uses, times, constant)

    def read_solution(self, values: Sequence[float]) -> AxisSplit:
        """Return the split that a solution describes."""
        # The solver's values are whole only within its tolerance: take the largest of each class.
        best = {
            colour: max(range(len(variables)), key=lambda i, variables=variables: values[variables[i]])  # type: ignore[misc]
            for colour, variables in self.variables.items()
        }
        steps = {name: offered[best[self.classes[name]]] for name, offered in self.choices.strategies.items()}
        sources = {key: offered[best[self.classes[key[0]]]] for key, offered in self.choices.source_placements.items()}
        return AxisSplit(self.setting.degree, steps, sources)

    def _add_choice(self, name: str, seconds: Sequence[float], limited: Sequence[float] | None) -> None:
        """Add the variables of a class, from the seconds and the limited bytes of one member's choices."""
        times = self._members[self.classes[name]]
        variables = [self.program.add_variable(cost * times, whole=True) for cost in seconds]
        self.variables[self.classes[name]] = variables
        self.program.add_row([(v, 1.0) for v in variables], 1.0, 1.0)
        if limited is not None:
            self.limited_terms += [(v, size * times) for v, size in zip(variables, limited, strict=True)]

    @cached_property
    def _members(self) -> Counter[int]:
        return Counter(self.classes.values())

    # ---- what flows --------------------------------------------------------------------------------------------------

    def _distinct_values(self) -> list[tuple[TensorKey, list[TensorUse], int]]:
        """Return one tensor of every kind, its readers (one of every kind), and how many tensors are alike."""
        kinds: dict[Hashable, tuple[TensorKey, list[TensorUse], int]] = {}
        for key, uses in self.setting.uses.items():
            distinct = {(self._class_of(use), use.index, use.is_write): use for use in uses}
            # Readers of one class that read at the same index choose alike: one flow stands for all of them.
            kind = (self.classes[key[0]], key[1], frozenset(distinct))
            first_key, readers, times = kinds.get(kind, (key, list(distinct.values()), 0))
            kinds[kind] = first_key, readers, times + 1
        return list(kinds.values())

    def _class_of(self, use: TensorUse) -> int:
        return -1 if use.step is None else self.classes[use.step.name]

    def _add_value(self, key: TensorKey, uses: Sequence[TensorUse], times: int, constant: int) -> None:
        supply = self._made_marginal(key)
        reads = [self._read_marginal(use, constant) for use in uses]
        for use, read in zip(uses, reads, strict=True):
            self._forbid_swaps(key, use, supply, read)
        # How many readers could ask for each placement: from two on, a redistribution is shared and paid for once.
        users = Counter(target for use, read in zip(uses, reads, strict=True) if not use.is_write for target in read)
        paid: Paid = {}
        for use, read in zip(uses, reads, strict=True):
            if use.is_write:
                # A write needs the tensor itself, not a redistributed copy: both ends have the same placement.
                for placement in {**supply, **read}:
                    terms = [(v, 1.0) for v in supply.get(placement, ())]
                    self.program.add_row([*terms, *((v, -1.0) for v in read.get(placement, ()))], 0.0, 0.0)
            else:
                self._add_flow(key, supply, read, times, users, paid)

    def _made_marginal(self, key: TensorKey) -> Marginal:
        placements: Sequence[Placement] | None = self.choices.source_placements.get(key)
        if placements is None:
            placements = [s.outputs[key[1]] for s in self.choices.strategies[key[0]]]
        return _placement_marginal(self.variables[self.classes[key[0]]], placements)

    def _read_marginal(self, use: TensorUse, constant: int) -> Marginal:
        if use.step is None:
            return {REPLICATE: [constant]}
        strategies = self.choices.strategies[use.step.name]
        return _placement_marginal(
            self.variables[self.classes[use.step.name]], [s.inputs[use.index] for s in strategies]
        )

    def _add_flow(
        self, key: TensorKey, supply: Marginal, read: Marginal, times: int, users: Counter[Placement], paid: Paid
    ) -> None:
        """Add the flow of one tensor to one reader: from the placements it may be made in to those needed.

        All redistributions of one kind (from any Shard, say) to a placement cost the same, so that they are one
        variable.
        """
        kinds: dict[Hashable, list[Placement]] = {}
        for placement in supply:
            kinds.setdefault("shard" if isinstance(placement, Shard) else placement, []).append(placement)
        straight = {p: self.program.add_variable() for p in supply if p in read}
        arriving: dict[Placement, list[int]] = {t: [straight[t]] if t in straight else [] for t in read}
        for kind, placements in kinds.items():
            leaving = [straight[p] for p in placements if p in straight]
            for target in read:
                # Every member of the kind but the target itself costs the same; a kind with the target alone needs no
                # move.
                start = next((p for p in placements if p != target), None)
                if start is not None:
                    cost = self.setting.redistribution_seconds(key, start, target) * times
                    size = self.setting.copied_bytes(key, start, target) * times if self._is_limited(key) else 0.0
                    flow = self._add_redistribution(cost, size, users[target], kind, target, paid)
                    leaving.append(flow)
                    arriving[target].append(flow)
            out = [(v, 1.0) for p in placements for v in supply[p]]
            self.program.add_row([*out, *((v, -1.0) for v in leaving)], 0.0, 0.0)
            # Within a kind of several placements only what is made in p can be read in p without a redistribution;
            # where the kind has one member, the row above says it already.
            if len(placements) > 1:
                for p in placements:
                    if p in straight:
                        self.program.add_row([(straight[p], 1.0), *((v, -1.0) for v in supply[p])], -1.0, 0.0)
        for target, flows in arriving.items():
            self.program.add_row([*((v, 1.0) for v in read[target]), *((v, -1.0) for v in flows)], 0.0, 0.0)

    def _is_limited(self, key: TensorKey) -> bool:
        """Return whether redistributed copies of a tensor count into the bytes that the purpose makes small."""
        if self.demands.purpose == "tensor":
            return self.setting.is_parameter(key)
        return self.setting.values[key].gradient and not self.setting.is_parameter(key)

    def _add_redistribution(
        self, cost: float, size: float, users: int, kind: Hashable, target: Placement, paid: Paid
    ) -> int:
        """Return the variable of a redistribution to one reader; its cost is shared if others may need it too."""
        flow = self.program.add_variable(cost if users < 2 else 0.0)
        payer = flow
        if users > 1 and (cost or size):
            payer = paid.get((kind, target), -1)
            if payer < 0:
                payer = paid[kind, target] = self.program.add_variable(cost)
                self.limited_terms += [(payer, size)] if size else []
            # flow <= payer: the price is paid as soon as one of the readers uses the redistribution.
            self.program.add_row([(flow, 1.0), (payer, -1.0)], -1.0, 0.0)
        elif size:
            self.limited_terms.append((flow, size))
        return flow

    def _forbid_swaps(self, key: TensorKey, use: TensorUse, supply: Marginal, read: Marginal) -> None:
        """Exclude that two axes swap their dimensions of a tensor: neither redistribution could go first."""
        for split in self.demands.other_axes.values():
            have = split.placement(key)
            then = needed_placement(split, use)
            # The other axis takes the tensor from dimension have.dim to then.dim: this axis must not do the opposite.
            if have != then and isinstance(have, Shard) and isinstance(then, Shard):
                sources = [v for p in supply if isinstance(p, Shard) and p.dim == then.dim for v in supply[p]]
                targets = [v for p in read if isinstance(p, Shard) and p.dim == have.dim for v in read[p]]
                if sources and targets:
                    self.program.add_row([(v, 1.0) for v in (*sources, *targets)], 0.0, 1.0)


def _placement_marginal(variables: Sequence[int], placements: Sequence[Placement]) -> Marginal:
    marginal: dict[Placement, list[int]] = {}
    for variable, placement in zip(variables, placements, strict=True):
        marginal.setdefault(placement, []).append(variable)
    return marginal
