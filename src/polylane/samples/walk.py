"""Abstract interpretation of a captured graph: every operator's values, as the parts of a batch make them up.

From the inputs on, each operator is taken by its placement rule (:mod:`polylane.samples.replica_calls`) or by the
algebra of what is additive (:mod:`polylane.samples.additivity`). Nothing is computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node
from polylane.graph.inplace import alias_groups, writes
from polylane.graph.keying import PerPart
from polylane.graph.precision import innermost
from polylane.graph.sizes import Size
from polylane.graph.statistics import batch_norm
from polylane.graph.twins import functional_name
from polylane.graph.whole_batch import Combine, WholeBatch
from polylane.placement.call import Call, Strategy, Value
from polylane.placement.placement import PARTIAL, REPLICATE, Cuts, Partial, Placement, Replicate, Shard
from polylane.placement.rules.registry import strategies
from polylane.placement.view import Key, Step, View, bound, key_of, op_of, view, with_candidates
from polylane.samples.additivity import (
    OWN,
    REPLICAS,
    ROW_EACH,
    WHOLE,
    Additive,
    Proportional,
    ScaledRows,
    State,
    in_order,
    power_of_additive,
    power_of_proportional,
    power_of_size,
    product,
    proportional,
)
from polylane.samples.ragged import is_ragged, masks, of_one_mask
from polylane.samples.replica_calls import (
    EXPANDING,
    REFORMING,
    as_replicas,
    copies,
    cuts_of,
    gives_its_own,
    made_of,
    plain_placements,
    same_numbers,
    selects,
)

# They give the places at which a mask is true.
_FINDING = {"nonzero", "nonzero_numpy"}
# They give elements of what they take, wherever they put them.
_MOVING = {*REFORMING, *EXPANDING, "alias", "clone", "contiguous", "detach", "permute", "slice", "to", "transpose"}
# One number all over, or none yet, in any size.
_FILLED = {"empty", "full", "ones", "zeros"}
# Numbers by a key, of which every sample has its own, or all have the same.
_DRAWN = {"rand", "randint", "randn", "randperm"}
_ADDING = {"add", "sub", "subtract", "rsub"}
_MULTIPLYING = {"mul", "multiply"}
_PRODUCTS = {"matmul", "mm", "bmm"}
_SUMMING = {"neg", "negative", "sum", "mean", "t"}
_DIVIDING = {"div", "divide", "true_divide"}
# They reduce to an element of what they take, or to whether there is one.
_EXTREMES = {"max": Combine.MAX, "amax": Combine.MAX, "any": Combine.MAX}
_EXTREMES |= {"min": Combine.MIN, "amin": Combine.MIN, "all": Combine.MIN}


@dataclass(frozen=True)
class Statistic:
    """A value that one operator needs of the whole batch.

    Attributes:
        user: the node that reads it.
        value: what is read: of the part alone so far.
        combine: how the whole batch's is made of the parts'; None for a size, which is known without asking anybody.
    """

    user: fx.Node
    value: fx.Node
    combine: Combine | None


@dataclass(frozen=True)
class Rescale:
    """An operand that must be multiplied by the batch's share, to some power, to be additive like the others.

    Attributes:
        user: the node that reads it; the graph's output for a loss.
        value: what is read.
        power: of how many times as many samples the whole batch has.
    """

    user: fx.Node
    value: fx.Node
    power: int


# How an autograd function's values are made up, given its node and how what it reads is; None where that is not proven.
Functions = Callable[[fx.Node, Step, Sequence[State]], Sequence[State] | None]


def walked(
    graph: Graph,
    per_sample: Collection[str] = (),
    *,
    counting: bool = False,
    given: Mapping[Key, State | None] | None = None,
    functions: Functions | None = None,
) -> Walk | None:
    """A graph walked to its end; None where it is not for the numbers of samples that are tried.

    Args:
        graph: nothing of it is computed.
        per_sample, counting: see :func:`polylane.samples.derivation.derive`.
        given: how placeholders are made up that are neither rows in order nor alike; None for one of which that is
            not known.
        functions: asked about every custom autograd function; default: nothing is known of any.
    """
    try:
        whole = view(graph, WHOLE, REPLICAS, ragged=True)
        own = view(graph, OWN, REPLICAS, ragged=True, batch=WHOLE)
    except PolylaneError:
        return None
    walk = Walk(graph, per_sample, whole, counting, given or {}, functions)
    for step, part in zip(whole.steps, own.steps, strict=True):
        walk.take(step, part.call)
    return walk


@dataclass
class Walk:
    """From the inputs on: of every tensor of which it is known, how the samples of two replicas make it up.

    Attributes:
        graph: of which the tensors are.
        per_sample: module paths of the user's own Python that treats every sample by itself, as the user says.
        view: the graph at the samples of both replicas.
        counting: whether statistics of the whole batch may be asked for.
        given, functions: see :func:`walked`.
        states: what is known so far.
        lies: of all tensors, how they are placed on two replicas if they are in order; None where they cannot be.
        numbers: those that have in each row the number of a row, which in a part is another one than in the whole; with
            how the rows that they number are cut.
    """

    graph: Graph
    per_sample: Collection[str]
    view: View
    counting: bool
    given: Mapping[Key, State | None] = field(default_factory=dict)
    functions: Functions | None = None
    states: dict[Key, State] = field(default_factory=dict)
    lies: dict[Key, Placement | None] = field(default_factory=dict)
    numbers: dict[Key, Cuts] = field(default_factory=dict)
    statistics: dict[tuple[fx.Node, fx.Node], Statistic] = field(default_factory=dict)
    rescaled: dict[tuple[fx.Node, fx.Node], Rescale] = field(default_factory=dict)
    unproven: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self.memory, self._gone = alias_groups(code), set[Key]()
        self._nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        self.described = {node.name: node for node in self.graph.nodes}
        self._given = given_by_inputs(code)
        self._masks = masks(code)
        self.buffers: dict[str, str] = {}  # a buffer of which replicas would have different values -> who writes it
        for node in code.nodes:
            vals = node.meta.get("val")
            for number, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals]):
                if isinstance(val, Tensor):
                    self.lies[key_of(node)[0], key_of(node)[1] + number] = in_order(val)
        sources = {key: self.given.get(key, self.lies[key]) for key in self.view.sources}
        self.states |= {key: state for key, state in sources.items() if state is not None}

    def take(self, step: Step, own: Call) -> None:
        """One operator: find out about its values; ``own``: as a replica calls it."""
        found = self._derived(step, own) if step.gives else None
        for place, key in enumerate(step.gives):
            state = None if found is None else found[place]
            if state is not None:
                self.states[key] = state
            else:
                self._lose(step)
        self._write(step)

    # ---- one operator ----

    def _derived(self, step: Step, own: Call) -> Sequence[State | None] | None:
        """How an operator's values are made up, if that can be proven."""
        node = self._nodes[step.name]
        if isinstance(node.target, WholeBatch):
            return self._counted(step, node.target)
        if step.call.op in ("leaf", "function"):
            return self._as_asked(step)
        if any(key in self._gone for key in (*step.gives, *step.reads)):
            return None
        if any(key not in self.states for key in step.reads) or _has_nodes(step.call.arguments):
            return None
        sizes = [each for each in node.all_input_nodes if isinstance(each.target, Size)]
        if any(power_of_size(each) is None for each in sizes):
            return None  # what they are for two and four samples says nothing of other numbers
        found = self._proven(step, own, node)
        if found is not None and not (writes(node) and any(state != REPLICATE for state in found)):
            return found
        return self._with_statistics(step, own, node) or found

    def _proven(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        states = [self.states[key] for key in step.reads]
        rows = [s for s in states if isinstance(s, (Shard, Replicate))]
        if len(rows) == len(states):
            found = self._of_rows(step, own, node) or self._algebra(step, own, node)
        else:
            found = self._algebra(step, own, node)
        return found or self._of_scaled(step, own, node)

    def _counted(self, step: Step, target: WholeBatch) -> Sequence[State | None] | None:
        """A statistic of the whole batch is alike for all parts, if what is combined is made up that way."""
        (key,) = step.reads
        state = self.states.get(key)
        node = self._nodes[step.name]
        (_, value) = node.args
        extreme = target.combine in (Combine.MAX, Combine.MIN) and _EXTREMES.get(_base(value)) is target.combine
        extreme = (
            extreme and isinstance(value, fx.Node) and self._has_extreme(self.key(value.all_input_nodes[0]), value)
        )
        wanted = {Combine.SUM: 0, Combine.MEAN: 1}.get(target.combine)
        return [REPLICATE] if extreme or (wanted is not None and power_of_additive(state) == wanted) else None

    def _as_asked(self, step: Step) -> Sequence[State | None] | None:
        """The user's own Python: nothing is known of it but what its trace proves, or the user says."""
        described = self.described[step.name]
        known = all(key in self.states for key in step.reads)
        alike = known and all(self.states[key] == REPLICATE for key in step.reads) and not self._grow(step)
        if alike and not (step.call.op == "function" and described.requires_grad):
            return [REPLICATE] * len(step.gives)
        if known and (proven := self._function(step)) is not None:
            return proven
        self.unproven.append(described)
        if not known or not _is_named(described.module, self.per_sample):
            return None
        if alike:
            return [REPLICATE] * len(step.gives)
        mean = Additive(1 if self.graph.mean or not self.graph.opaque else 0)
        floating = [value.dtype.is_floating_point for value in step.call.outputs]
        return [
            p if isinstance(p, Shard) else mean if p is not None and number else None
            for p, number in zip((self.lies[key] for key in step.gives), floating, strict=True)
        ]

    def _function(self, step: Step) -> Sequence[State] | None:
        """A custom autograd function, if its forward and backward pass prove how its values are made up."""
        reads = [(key, self.states[key]) for key in step.reads]
        if step.call.op != "function" or self.functions is None:
            return None
        if any(key in self.numbers or self.lies[key] is None for key in step.reads):
            return None
        if any(isinstance(state, (Shard, Replicate)) and state != self.lies[key] for key, state in reads):
            return None
        if any(key in self._gone for key in step.gives):
            return None
        return self.functions(self._nodes[step.name], step, [state for _, state in reads])

    def _grow(self, step: Step) -> bool:
        return any(isinstance(self.lies[key], Shard) or self.lies[key] is None for key in step.gives)

    # ---- rows ----

    def _of_rows(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """An operator on rows, and on what is alike."""
        if not of_one_mask(node.all_input_nodes, self._masks):
            return None  # rows that two masks selected need not be as many in a part
        base, in_order = step.call.base, [self.lies.get(key) for key in step.gives]
        if any(lies is None for lies in in_order):
            return None
        if base in REFORMING and step.call.inputs[0].count != step.call.outputs[0].count:
            return None  # it holds for another number of samples
        if not step.reads and base in _FILLED:
            return self._filled(step, own, node, in_order)
        if not step.reads and base in _DRAWN:
            return in_order if self._draws_alike(step, own, node, in_order[0]) else None
        if not step.reads and base == "arange" and step.call.arguments != own.arguments:
            self.numbers |= dict.fromkeys(step.gives, ROW_EACH)
            first, stride = step.call.arguments.get("start", 0), step.call.arguments.get("step", 1)
            return in_order if (first, step.call["end"], stride) == (0, WHOLE, 1) else None
        numbered = [key in self.numbers for key in step.reads]
        if base == "index" and any(numbered):
            return in_order if self._from_own_rows(step, in_order[0]) else None
        if any(numbered):
            if len(numbered) == 1:
                self.numbers |= dict.fromkeys(step.gives, self.numbers[step.reads[0]])
            if base not in _MOVING or len(numbered) > 1:
                return None
        if base in _FINDING or step.call.op == "aten.where.default":
            return in_order if self._found(step) else None
        if selects(step.call):
            return in_order if self._selected(step, in_order[0]) else None
        return self._by_rules(step, own, node)

    def _filled(
        self, step: Step, own: Call, node: fx.Node, in_order: Sequence[Placement | None]
    ) -> Sequence[State | None] | None:
        if {**step.call.arguments, "size": ()} == {**own.arguments, "size": ()}:
            return in_order
        value = bound(node, node.args, node.kwargs)[1].get("fill_value")
        others = {**step.call.arguments, "size": (), "fill_value": 0} == {**own.arguments, "size": (), "fill_value": 0}
        power = power_of_size(value) if isinstance(value, fx.Node) and isinstance(value.target, Size) else None
        return [proportional(power)] if power is not None and others and in_order == [REPLICATE] else None

    def _draws_alike(self, step: Step, own: Call, node: fx.Node, lies: Placement | None) -> bool:
        """Whether a part draws, of numbers that no value has a say in, those of its own samples."""
        if not step.call.prefix or isinstance(innermost(node.target), PerPart):
            return False
        same = {**step.call.arguments, "size": ()} == {**own.arguments, "size": ()}
        return same and node.args[2] == (lies.dim if isinstance(lies, Shard) else None)

    def _by_rules(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        given = [self.states[key] for key in step.reads]
        call = self._as_functional(step, node)
        for strategy in strategies(call):
            if plain_placements(strategy.inputs) != given:
                continue
            if any(isinstance(p, Partial) for p in strategy.outputs):
                if all(isinstance(p, Partial) for p in strategy.outputs):
                    power = self._power_of_sum(step, node, call, own, strategy)
                    if power is not None:
                        return [Additive(power)] * len(step.gives)
            elif gives_its_own(strategy, call, own) and as_replicas(node, call, own, strategy):
                return plain_placements(strategy.outputs)
        return None

    def _as_functional(self, step: Step, node: fx.Node) -> Call:
        call = with_candidates(step.call, cuts_of(step, self.states))
        if writes(node):
            call = replace(call, op=functional_name(node) or call.op, written=frozenset())
        return call

    def _power_of_sum(self, step: Step, node: fx.Node, call: Call, own: Call, strategy: Strategy) -> int | None:
        """With which power parts are additive where a rule gives two ranks a summand each; None: with none."""
        if any(a.shape != b.shape for a, b in zip(call.outputs, own.outputs, strict=True)):
            return None
        if isinstance(innermost(node.target), PerPart) or not call.op.startswith("aten."):
            return None
        if call.prefix and any(isinstance(p, Shard) for p in strategy.inputs) and node.args[2] is None:
            return None  # the numbers drawn are not the samples' own
        made = [made_of(node, call, own, strategy, rank) for rank in range(REPLICAS)]
        if all(each is not None and each.same for each in made):
            return 0
        ragged = any(is_ragged(n.meta.get("val")) for n in node.all_input_nodes)
        if not ragged and all(each is not None and each.share_of_mean for each in made):
            return 1
        return None

    def _selected(self, step: Step, lies: Placement | None) -> bool:
        """Whether rows that a mask selects come sample after sample: both have their samples first."""
        masks = [v for v in step.call.inputs if v.dtype is torch.bool]
        if len(masks) != 1:
            return False
        rows = [self.states[key] for key in step.reads]
        mask, x = masks[0], step.call.inputs[0]
        first = all(isinstance(p, Shard) and p.dim == 0 for p in rows)
        same = x.shape[: mask.dim] == mask.shape and (step.call.base == "index" or x.dim == mask.dim)
        return first and same and isinstance(lies, Shard) and lies.dim == 0

    def _found(self, step: Step) -> bool:
        """Whether the places at which a mask is true come sample after sample; in the first dimension, numbers of rows.

        One table of all dimensions' places (nonzero) is known for masks of one dimension alone.
        """
        mask, state = step.call.inputs[0], self.states[step.reads[0]]
        if not isinstance(state, Shard) or state.dim != 0 or (step.call.base == "nonzero" and mask.dim != 1):
            return False
        self.numbers[step.gives[0]] = state.cuts
        return True

    def _from_own_rows(self, step: Step, lies: Placement | None) -> bool:
        """Whether what stands at some positions stands, of every sample, in the row that has the sample's number."""
        x, indices = step.reads[0], step.call["indices"]
        if x in self.numbers or not all(isinstance(i, Value) for i in indices):
            return False
        if [step.reads[i.index] in self.numbers for i in indices] != [True, *[False] * (len(indices) - 1)]:
            return False
        cuts = self.numbers[step.reads[indices[0].index]]
        if self.states[x] != Shard(0, cuts):  # they number the rows of something else
            return False
        placed = [(self.states[step.reads[i.index]], i.dim) for i in indices]
        wide = max(dims for _, dims in placed)  # they are broadcast to each other, and their dimensions come first
        rows = [Shard(p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
        return isinstance(placed[0][0], Shard) and all(row == lies for row in rows)

    # ---- sums and means ----

    def _algebra(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """An operator on sums, means and numbers of samples."""
        base = step.call.base
        if any(isinstance(self.lies.get(key), Shard) or self.lies.get(key) is None for key in step.gives):
            return None
        if base in _ADDING | _MULTIPLYING | _DIVIDING and not writes(node):
            names = bound(node, node.args, node.kwargs)[1]
            left, right = (self._operand(names[name]) for name in ("self", "other"))
            if left is None or right is None or isinstance(left, Shard) or isinstance(right, Shard):
                return None
            if base in _ADDING:
                return self._sum(step, own, node, left, right)
            if base in _DIVIDING and step.call.arguments.get("rounding_mode") is not None:
                return None
            return product(left, right, -1 if base in _DIVIDING else 1)
        return self._linear(step, own, node)

    def _operand(self, value: Any) -> State | None:
        """How an argument is made up, be it a number."""
        if isinstance(value, fx.Node):
            if isinstance(value.target, Size):
                power = power_of_size(value)
                return None if power is None else proportional(power)
            return self.states.get(self.key(value)) if isinstance(value.meta.get("val"), Tensor) else None
        return REPLICATE if isinstance(value, (int, float, complex)) else None

    def key(self, node: fx.Node) -> Key:
        key = key_of(node)
        return self.view.aliases.get(key[0], key)

    def _sum(self, step: Step, own: Call, node: fx.Node, left: State, right: State) -> Sequence[State | None] | None:
        names = ("alpha",)
        if any(step.call.arguments.get(name) != own.arguments.get(name) for name in names):
            return None
        a, b = power_of_proportional(left), power_of_proportional(right)
        if a is not None and a == b:
            return [left]
        powers = power_of_additive(left), power_of_additive(right)
        if None in powers:
            return None
        if powers[0] == powers[1]:
            return [Additive(powers[0] or 0)]
        if not self.counting:
            return None
        # A sum beside a mean: what is not a mean is made one.
        arguments = bound(node, node.args, node.kwargs)[1]
        for name, power in zip(("self", "other"), powers, strict=True):
            if power != 1:
                value = arguments[name]
                if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
                    return None
                self.rescaled[node, value] = Rescale(node, value, 1 - (power or 0))
        return [Additive(1)]

    def _linear(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """An operator that is linear in what is additive, everything else being alike."""
        if step.call.arguments.keys() != own.arguments.keys() or not same_numbers(step.call, own):
            return None
        states = [self.states[key] for key in step.reads]
        if copies(step.call):
            return [states[0]]
        for power in {p for s in states if s != REPLICATE and (p := power_of_additive(s)) is not None}:
            exact = [PARTIAL if s != REPLICATE and power_of_additive(s) == power else s for s in states]
            every = [PARTIAL if power_of_additive(s) == power else s for s in states]
            for given in (exact, every):
                if self._is_linear(step, own, node, given):
                    scaled = {power_of_proportional(s) for s, p in zip(states, given, strict=True) if p == PARTIAL}
                    only = next(iter(scaled)) if len(scaled) == 1 else None
                    return [Additive(power) if only is None else proportional(only)] * len(step.gives)
        return None

    def _is_linear(self, step: Step, own: Call, node: fx.Node, given: Sequence[Any]) -> bool:
        call = self._as_functional(step, node)
        fitting = (s for s in strategies(call) if plain_placements(s.inputs) == list(given))
        partial = (s for s in fitting if s.outputs and all(isinstance(p, Partial) for p in s.outputs))
        return any(
            all((made := made_of(node, call, own, s, rank)) is not None and made.same for rank in range(REPLICAS))
            for s in partial
        )

    # ---- rows that a power of the share scales ----

    def _of_scaled(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """An operator that is linear in each of its scaled operands: as without the scales, times their product."""
        if self.counting or writes(node) or any(key in self.numbers for key in step.reads):
            return None  # where counts may be of the whole batch, nothing need be scaled
        names = bound(node, node.args, node.kwargs)[1]
        power = self._scale_of(step.call, {name: v for name, v in names.items() if isinstance(v, fx.Node)})
        if power is None:
            return None
        sizes = {name: step.call.arguments[name] for name, v in names.items() if _is_size(v)}
        before = dict(self.states)
        self.states |= {key: _unscaled(self.states[key]) for key in step.reads}
        found = self._by_rules(step, replace(own, arguments={**own.arguments, **sizes}), node)
        self.states = before
        return None if found is None else [None if state is None else _scaled(state, power) for state in found]

    def _scale_of(self, call: Call, operands: Mapping[str, fx.Node]) -> int | None:
        """The power of the share in an operator's value, where it has one."""
        powers = {name: self._scale(value) for name, value in operands.items()}
        if None in powers.values() or not any(powers.values()):
            return None
        scales = {name: power or 0 for name, power in powers.items()}
        if call.base in _MULTIPLYING | _PRODUCTS:
            return sum(scales.values())
        if call.base in _DIVIDING and call.arguments.get("rounding_mode") is None:
            return scales.get("self", 0) - scales.get("other", 0)
        if call.base in _ADDING:
            alike = scales.keys() == {"self", "other"} and scales["self"] == scales["other"]
            return scales["self"] if alike else None
        linear = call.base in _MOVING | _SUMMING and not any(p for name, p in scales.items() if name != "self")
        return scales.get("self") if linear else None

    def _scale(self, value: fx.Node) -> int | None:
        if isinstance(value.target, Size):
            return power_of_size(value)
        state = self.states.get(self.key(value)) if isinstance(value.meta.get("val"), Tensor) else None
        if isinstance(state, (ScaledRows, Proportional)):
            return state.power
        return 0 if isinstance(state, (Shard, Replicate)) else None

    # ---- what can be counted over the whole batch first ----

    def _with_statistics(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """The operator's values if what stands in the way, and depends on inputs alone, is of the whole batch."""
        if not self.counting:
            return None
        extreme = self._extreme(step, node)
        if extreme is not None:
            return extreme
        before = dict(self.states)
        wanted: list[Statistic] = []
        for value in node.all_input_nodes:
            statistic = self._statistic(node, value)
            if statistic is not None:
                wanted.append(statistic)
                if isinstance(value.meta.get("val"), Tensor):
                    self.states[self.key(value)] = REPLICATE
        if not wanted:
            return None
        with_sizes = own if not any(w.combine is None for w in wanted) else self._whole_sizes(step, own, node, wanted)
        found = self._proven(step, with_sizes, node)
        self.states = {**self.states, **{k: s for k, s in before.items() if k not in step.gives}}
        if found is not None:
            self.statistics |= {(w.user, w.value): w for w in wanted}
        return found

    def _statistic(self, node: fx.Node, value: fx.Node) -> Statistic | None:
        if isinstance(value.target, Size):
            return Statistic(node, value, None) if power_of_size(value) == 1 else None
        if value not in self._given or not isinstance(value.meta.get("val"), Tensor):
            return None
        state = self.states.get(self.key(value))
        if not isinstance(state, (Additive, Proportional)):
            return None
        power = power_of_additive(state)
        combine = None if power is None else {0: Combine.SUM, 1: Combine.MEAN}.get(power)
        if combine is None or (combine is Combine.MEAN and not value.meta["val"].is_floating_point()):
            return None
        return Statistic(node, value, combine)

    def _whole_sizes(self, step: Step, own: Call, node: fx.Node, wanted: Sequence[Statistic]) -> Call:
        """A replica's call with the whole batch's sizes where they are wanted."""
        sizes = {w.value for w in wanted if w.combine is None}
        named = bound(node, node.args, node.kwargs)[1]
        whole = {name: step.call.arguments[name] for name, value in named.items() if value in sizes}
        return replace(own, arguments={**own.arguments, **whole})

    def _extreme(self, step: Step, node: fx.Node) -> Sequence[State | None] | None:
        """The largest of all samples' values, which nothing but the inputs have a say in."""
        combine = _EXTREMES.get(step.call.base)
        single = len(step.reads) == 1 and len(step.gives) == 1
        if combine is None or not single or node not in self._given or self.lies[step.gives[0]] != REPLICATE:
            return None
        if not self._has_extreme(step.reads[0], node) or not node.users:
            return None
        for user in node.users:
            if not isinstance(user.target, WholeBatch):
                self.statistics[user, node] = Statistic(user, node, combine)
        return [REPLICATE]

    def _has_extreme(self, key: Key, node: fx.Node) -> bool:
        """Whether the largest of the parts' largest values is the whole's: of rows of which every part has some.

        A row's number is another one in a part; and a mask may select nothing of a part.
        """
        rows = isinstance(self.states.get(key), Shard) and key not in self.numbers
        return rows and not any(is_ragged(n.meta.get("val")) for n in node.all_input_nodes)

    # ---- writes ----

    def _lose(self, step: Step) -> None:
        """Whatever shares memory to which something unknown is written is unknown from then on."""
        if written := {self.memory[each] for each in writes(self._nodes[step.name])}:
            self._gone |= {key_of(node) for node, memory in self.memory.items() if memory in written}
            self.states = {key: state for key, state in self.states.items() if key not in self._gone}

    def _write(self, step: Step) -> None:
        """What is written to a buffer must be alike for all parts."""
        node = self._nodes[step.name]
        if step.call.op in ("leaf", "function"):  # of which only the user knows what it writes
            return
        for memory in {self.memory[each] for each in writes(node)}:
            self._lose_mixed(memory, [self.states.get(key) for key in step.gives])
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            if all(self.states.get(key) == REPLICATE for key in step.gives) and key_of(memory) in self.states:
                continue
            self.buffers.setdefault(str(memory.meta["role"][1]), step.name)
            self._gone |= {key_of(other) for other, of in self.memory.items() if of is memory}
            self.states = {key: state for key, state in self.states.items() if key not in self._gone}

    def _lose_mixed(self, memory: fx.Node, written: Sequence[State | None]) -> None:
        """Memory that is alike, or rows, stays known only where the same is written to it; every view sees what is."""
        aliases = [key for node, of in self.memory.items() if of is memory and (key := key_of(node)) in self.states]
        kinds = {type(state) for state in (*(self.states[key] for key in aliases), *written)}
        if kinds <= {Replicate} or kinds <= {Shard}:
            return
        self._gone |= {key_of(node) for node, of in self.memory.items() if of is memory}
        self.states = {key: state for key, state in self.states.items() if key not in self._gone}


def given_by_inputs(code: fx.Graph) -> set[fx.Node]:
    """Nodes that the batch alone decides, with constants and buffers that nobody writes: no parameter, no chance."""
    memory = alias_groups(code)
    written = {memory[each] for node in code.nodes for each in writes(node)}
    for node in code.nodes:
        if innermost(node.target) is batch_norm:  # running mean and variance move with what the model computes
            written |= {memory[each] for each in node.args[4:6] if isinstance(each, fx.Node)}
    found: set[fx.Node] = set()
    for node in code.nodes:
        if memory[node] in written:
            continue
        if node.op == "placeholder":
            if node.meta["role"][0] in ("input", "constant", "buffer", "part"):
                found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            target = innermost(node.target)
            sure = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
            if sure or isinstance(target, (Size, WholeBatch)) or target is operator.getitem:
                found.add(node)
    return found


def _is_named(module: str, names: Collection[str]) -> bool:
    """Whether a module is one of those named, or inside one of them."""
    return any(name == "model" or module == name or module.startswith(f"{name}.") for name in names)


def _is_size(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.target, Size)


def _unscaled(state: State) -> State:
    if isinstance(state, ScaledRows):
        return state.rows
    return REPLICATE if isinstance(state, Proportional) else state


def _scaled(state: State, power: int) -> State | None:
    """A value times a power of the part's share."""
    if isinstance(state, Shard):
        return ScaledRows(state, power) if power else state
    if isinstance(state, Additive):
        return Additive(state.power - power)
    return proportional(power) if state == REPLICATE else None


def _has_nodes(value: Any) -> bool:
    """Whether a call has a number among its arguments of which nothing is known but that it depends on data."""
    if isinstance(value, Mapping):
        return any(_has_nodes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_nodes(v) for v in value)
    return isinstance(value, fx.Node)


def _base(node: Any) -> str:
    return op_of(node).split(".")[1] if isinstance(node, fx.Node) and op_of(node).startswith("aten.") else ""
