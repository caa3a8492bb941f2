"""Additivity over samples, derived: how the parts of a batch make up every value of a captured graph, for all inputs.

Nothing is computed. An operator's placement rule says what each of two ranks computes when the samples are cut between
them. Where that is the very call that a replica makes which has these samples alone, the parts' values make up the
whole's as the rule says: row after row, or in their sum. What no rule proves is not known.

A batch of n samples is divided into parts of n_i samples. A value of the whole batch is, of the values of the parts,

    rows            the parts one after another along the dimension of the samples     Shard
    alike           each of them                                                       Replicate
    additive(q)     the sum of (n_i / n)^q times each: q = 0 is a sum, q = 1 a mean    Additive
    proportional(p) part_i = (n_i / n)^p whole: a number of samples has p = 1          Proportional

Linear operators keep additive(q); additive(q) times proportional(p) is additive(q - p). Rows become additive where an
operator sums over the samples. Everything else that joins rows, or is not linear, makes an unknown value, unless what
stands in the way depends on the inputs alone: then it can be counted over the whole batch first (a *statistic*, see
:mod:`polylane.samples.counts`), and is alike for all parts.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node
from polylane.graph.inplace import alias_groups, writes
from polylane.graph.keying import PerPart
from polylane.graph.orders import Order, Seen
from polylane.graph.precision import innermost
from polylane.graph.sizes import Size, grows, size_function
from polylane.graph.statistics import batch_norm
from polylane.graph.twins import functional_name
from polylane.graph.whole_batch import BatchShare, Combine, WholeBatch, WholeSize
from polylane.placement.call import Call, Edit, Place, Strategy, Value
from polylane.placement.placement import (
    PARTIAL,
    REPLICATE,
    Cuts,
    Partial,
    Placement,
    Replicate,
    Shard,
    even,
    local_shape,
)
from polylane.placement.reduced import Mean
from polylane.placement.rules.registry import strategies
from polylane.placement.view import Key, Step, View, bound, key_of, op_of, view, with_candidates

aten = torch.ops.aten

# Two replicas with two samples each.
OWN, REPLICAS = 2, 2
WHOLE = OWN * REPLICAS
ROW_EACH = even(WHOLE, REPLICAS)

# Numbers of samples at which a size must be proportional to them: small ones, and some beyond any bound in the code.
PROBES = (*range(1, 2 * WHOLE), 63, 1024, 65_537)

# They give all that they take, in the same order, or each element several times: the shape of their value says it all.
_REFORMING = {"flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"}
_EXPANDING = {"broadcast_to", "expand", "expand_as"}
# They give elements of what they take, wherever they put them.
_MOVING = {*_REFORMING, *_EXPANDING, "alias", "clone", "contiguous", "detach", "permute", "slice", "to", "transpose"}
# One number all over, or none yet, in any size.
_FILLED = {"empty", "full", "ones", "zeros"}
# Numbers by a key, of which every sample has its own, or all have the same.
_DRAWN = {"rand", "randint", "randn", "randperm"}
_ADDING = {"add", "sub", "subtract", "rsub"}
_MULTIPLYING = {"mul", "multiply"}
_DIVIDING = {"div", "divide", "true_divide"}
_COPYING = {"to", "_to_copy", "type_as", "alias", "clone", "contiguous", "detach", "lift_fresh_copy"}
# They reduce to an element of what they take, or to whether there is one.
_EXTREMES = {"max": Combine.MAX, "amax": Combine.MAX, "any": Combine.MAX}
_EXTREMES |= {"min": Combine.MIN, "amin": Combine.MIN, "all": Combine.MIN}


@dataclass(frozen=True)
class Additive:
    """The whole's value is the sum of the parts' values, each times its share of the samples to some power.

    Attributes:
        power: 0 for a sum, 1 for a mean over samples.
    """

    power: int


@dataclass(frozen=True)
class Proportional:
    """A part's value is the whole's times its share of the samples to some power, which is not 0."""

    power: int


State = Placement | Additive | Proportional


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


@dataclass(frozen=True)
class Derivation:
    """What is proven of a graph.

    Attributes:
        states: of every tensor of which it is known, how the parts make it up.
        orders: the same by node name, as plans ask for it.
        statistics, rescaled: what must be added to the graph for this to hold.
        culprit: the operator at which the loss stops being made up of the parts' losses; None where it never does.
        why: in a few words, what that operator does.
        buffer: a buffer that replicas would disagree on, with the operator that writes it.
        counters: buffers that something else than a batch normalization writes, once for each part.
        unproven: nodes that run the user's own Python on samples, about which only the user knows.
    """

    states: Mapping[Key, State]
    orders: Mapping[str, Order]
    statistics: tuple[Statistic, ...] = ()
    rescaled: tuple[Rescale, ...] = ()
    culprit: Node | None = None
    why: str = ""
    buffer: tuple[str, Node] | None = None
    counters: tuple[tuple[str, Node], ...] = ()
    unproven: tuple[Node, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the loss, and every buffer, is made up of the parts'."""
        return self.culprit is None and self.buffer is None


def proven_orders(graph: Graph, known: Mapping[str, Order] | None = None) -> dict[str, Order]:
    """The values of a graph that hold samples in their order, or are the same for any, by the rules of its operators.

    Args:
        graph: nothing of it is computed.
        known: of some of its values, by node name.
    """
    both = (Order.ROWS, Order.ALIKE)
    return {name: order for name, order in derive(graph, known=known).orders.items() if order in both}


def known_orders(graph: Graph, per_sample: Collection[str] = ()) -> Seen:
    """How the parts of a batch make up the values of a graph that may cross between stages; see :func:`derive`."""
    return Seen(derive(graph, per_sample).orders, "")


def derive(
    graph: Graph,
    per_sample: Collection[str] = (),
    known: Mapping[str, Order] | None = None,
    *,
    counting: bool = False,
) -> Derivation:
    """How the parts of a batch make up the values of a graph, and its loss.

    Args:
        graph: nothing of it is computed.
        per_sample: module paths of what runs the user's own Python and, as the user says, treats every sample by
            itself; "model" for all of it.
        known: how parts make up some of its values, by node name, where that is known otherwise.
        counting: whether statistics of the whole batch, and shares of it, may be added to the graph: they are told.
    """
    nodes = graph.code.fx.nodes
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
    nothing = Derivation({}, {}, culprit=graph.nodes[-1], why="fixed")
    if not any(isinstance(val, Tensor) and any(map(grows, val.shape)) for val in inputs):
        return nothing
    unseen = next((n for n in nodes if _writes_unseen(n)), None)
    if unseen is not None:
        at_fault = next(node for node in graph.nodes if node.id == unseen.name)
        return Derivation({}, {}, culprit=at_fault, why="writes in place")
    try:
        whole = view(graph, WHOLE, REPLICAS, ragged=True)
        own = view(graph, OWN, REPLICAS, ragged=True, batch=WHOLE)
    except PolylaneError:  # not for these numbers of samples
        return nothing
    walk = _Walk(graph, per_sample, known or {}, whole, counting)
    for step, part in zip(whole.steps, own.steps, strict=True):
        walk.take(step, part.call)
    return walk.conclude()


def _writes_unseen(node: fx.Node) -> bool:
    """Whether an operator writes in place under a setting, or with a key, of its own: whose memory, nobody tells."""
    base = op_of(node).split(".")[1] if node.op == "call_function" and op_of(node).startswith("aten.") else ""
    return base.endswith("_") and not base.endswith("__") and not writes(node)


# ---- the algebra of states -------------------------------------------------------------------------------------------


def power_of_additive(state: State | None) -> int | None:
    """The power with which a value is additive; None where it is not known to be."""
    if isinstance(state, Additive):
        return state.power
    power = power_of_proportional(state)
    return None if power is None else 1 - power  # the shares of all parts make up 1


def power_of_proportional(state: State | None) -> int | None:
    """The power of the share that a part has of a value; 0 where all parts are alike; None where it is not known."""
    if isinstance(state, Proportional):
        return state.power
    return 0 if state == REPLICATE else None


def proportional(power: int) -> State:
    """A value of which a part has its share of the samples, to some power."""
    return Proportional(power) if power else REPLICATE


def power_of_size(node: fx.Node) -> int | None:
    """With which power of the number of samples a size grows; None where it is no power."""
    target: Any = node.target
    if isinstance(target, BatchShare):
        return -target.power
    if isinstance(target, WholeSize):
        return 0
    for power in (0, 1, -1):
        try:
            if all(math.isclose(target.of(n), target.of(1) * float(n) ** power, rel_tol=1e-12) for n in PROBES):
                return power
        except (ArithmeticError, TypeError, ValueError):
            return None
    return None


# ---- the walk --------------------------------------------------------------------------------------------------------


@dataclass
class _Walk:
    """From the inputs on: of every tensor of which it is known, how the samples of two replicas make it up.

    Attributes:
        graph: of which the tensors are.
        per_sample: see :func:`derive`.
        known: of some tensors, how the parts of a batch make them up.
        view: the graph at the samples of both replicas.
        counting: see :func:`derive`.
        states: what is known so far.
        lies: of all tensors, how they are placed on two replicas if they are in order; None where they cannot be.
        numbers: those that have in each row the row's own number, which in a part is another one than in the whole.
    """

    graph: Graph
    per_sample: Collection[str]
    known: Mapping[str, Order]
    view: View
    counting: bool
    states: dict[Key, State] = field(default_factory=dict)
    lies: dict[Key, Placement | None] = field(default_factory=dict)
    numbers: set[Key] = field(default_factory=set)
    statistics: dict[tuple[fx.Node, fx.Node], Statistic] = field(default_factory=dict)
    rescaled: dict[tuple[fx.Node, fx.Node], Rescale] = field(default_factory=dict)
    unproven: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self._memory, self._gone = alias_groups(code), set[Key]()
        self._nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        self._described = {node.name: node for node in self.graph.nodes}
        self._given = given_by_inputs(code)
        self._buffers: dict[str, str] = {}  # a buffer of which replicas would have different values -> who writes it
        for node in code.nodes:
            vals = node.meta.get("val")
            for number, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals]):
                if isinstance(val, Tensor):
                    self.lies[key_of(node)[0], key_of(node)[1] + number] = _in_order(val)
        self.states |= {key: p for key in self.view.sources if (p := self.lies[key]) is not None}
        keys = {name: self.view.aliases.get(name, (name, 0)) for name in self.known}
        lying = (Order.ROWS, Order.ALIKE)
        self._known = {key: self.lies.get(key) if self.known[name] in lying else None for name, key in keys.items()}

    def take(self, step: Step, own: Call) -> None:
        """One operator: find out about its values; ``own``: as a replica calls it."""
        found = self._derived(step, own) if any(key not in self._known for key in step.gives) else None
        for place, key in enumerate(step.gives):
            state = self._known[key] if key in self._known else found[place] if found is not None else None
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
        found = self._proven(step, own, node)
        if found is not None and not (writes(node) and any(state != REPLICATE for state in found)):
            return found
        return self._with_statistics(step, own, node) or found

    def _proven(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        states = [self.states[key] for key in step.reads]
        rows = [s for s in states if isinstance(s, (Shard, Replicate))]
        if len(rows) == len(states):
            return self._of_rows(step, own, node) or self._algebra(step, own, node)
        return self._algebra(step, own, node)

    def _counted(self, step: Step, target: WholeBatch) -> Sequence[State | None] | None:
        """A statistic of the whole batch is alike for all parts, if what is combined is made up that way."""
        (key,) = step.reads
        state = self.states.get(key)
        node = self._nodes[step.name]
        (_, value) = node.args
        extreme = target.combine in (Combine.MAX, Combine.MIN) and _EXTREMES.get(_base(value)) is target.combine
        wanted = {Combine.SUM: 0, Combine.MEAN: 1}.get(target.combine)
        return [REPLICATE] if extreme or (wanted is not None and power_of_additive(state) == wanted) else None

    def _as_asked(self, step: Step) -> Sequence[State | None] | None:
        """The user's own Python: nothing is known of it but what the user says."""
        described = self._described[step.name]
        known = all(key in self.states for key in step.reads)
        if known and all(self.states[key] == REPLICATE for key in step.reads) and not self._grow(step):
            return [REPLICATE] * len(step.gives)
        self.unproven.append(described)
        if not known or not _is_named(described.module, self.per_sample):
            return None
        mean = Additive(1 if self.graph.mean or not self.graph.opaque else 0)
        return [p if isinstance(p := self.lies[key], Shard) else mean if p is not None else None for key in step.gives]

    def _grow(self, step: Step) -> bool:
        return any(isinstance(self.lies[key], Shard) or self.lies[key] is None for key in step.gives)

    # ---- rows ----

    def _of_rows(self, step: Step, own: Call, node: fx.Node) -> Sequence[State | None] | None:
        """An operator on rows, and on what is alike."""
        base, in_order = step.call.base, [self.lies.get(key) for key in step.gives]
        if any(lies is None for lies in in_order):
            return None
        if base in _REFORMING and step.call.inputs[0].count != step.call.outputs[0].count:
            return None  # it holds for another number of samples
        if not step.reads and base in _FILLED:
            return self._filled(step, own, node, in_order)
        if not step.reads and base in _DRAWN:
            return in_order if self._draws_alike(step, own, node, in_order[0]) else None
        if not step.reads and base == "arange" and step.call.arguments != own.arguments:
            self.numbers |= {*step.gives}
            first, stride = step.call.arguments.get("start", 0), step.call.arguments.get("step", 1)
            return in_order if (first, step.call["end"], stride) == (0, WHOLE, 1) else None
        numbered = [key in self.numbers for key in step.reads]
        if base == "index" and any(numbered):
            return in_order if self._from_own_rows(step, in_order[0]) else None
        if any(numbered):
            self.numbers |= {*step.gives}
            if base not in _MOVING or len(numbered) > 1:
                return None
        if _selects(step.call):
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
            if _plain(strategy.inputs) != given:
                continue
            if any(isinstance(p, Partial) for p in strategy.outputs):
                if all(isinstance(p, Partial) for p in strategy.outputs):
                    power = self._power_of_sum(step, node, call, own, strategy)
                    if power is not None:
                        return [Additive(power)] * len(step.gives)
            elif _gives(strategy, call, own) and _as_replicas(node, call, own, strategy):
                return _plain(strategy.outputs)
        return None

    def _as_functional(self, step: Step, node: fx.Node) -> Call:
        call = with_candidates(step.call, _cuts(step, self.states))
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
        made = [_made_of(node, call, own, strategy, rank) for rank in range(REPLICAS)]
        if all(each is not None and each.same for each in made):
            return 0
        ragged = any(_is_ragged(n.meta.get("val")) for n in node.all_input_nodes)
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

    def _from_own_rows(self, step: Step, lies: Placement | None) -> bool:
        """Whether what stands at some positions stands, of every sample, in the row that has the sample's number."""
        x, indices = step.reads[0], step.call["indices"]
        if x in self.numbers or self.states[x] != Shard(0, ROW_EACH) or not all(isinstance(i, Value) for i in indices):
            return False
        if [step.reads[i.index] in self.numbers for i in indices] != [True, *[False] * (len(indices) - 1)]:
            return False
        placed = [(self.states[step.reads[i.index]], i.dim) for i in indices]
        wide = max(dims for _, dims in placed)  # they are broadcast to each other, and their dimensions come first
        rows = [Shard(p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
        return isinstance(placed[0][0], Shard) and placed[0][0].cuts == ROW_EACH and all(row == lies for row in rows)

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
            return _product(left, right, -1 if base in _DIVIDING else 1)
        return self._linear(step, own, node)

    def _operand(self, value: Any) -> State | None:
        """How an argument is made up, be it a number."""
        if isinstance(value, fx.Node):
            if isinstance(value.target, Size):
                power = power_of_size(value)
                return None if power is None else proportional(power)
            return self.states.get(self._key(value)) if isinstance(value.meta.get("val"), Tensor) else None
        return REPLICATE if isinstance(value, (int, float, complex)) else None

    def _key(self, node: fx.Node) -> Key:
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
        if step.call.arguments.keys() != own.arguments.keys() or not _same_numbers(step.call, own):
            return None
        states = [self.states[key] for key in step.reads]
        if _copies(step.call):
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
        fitting = (s for s in strategies(call) if _plain(s.inputs) == list(given))
        partial = (s for s in fitting if s.outputs and all(isinstance(p, Partial) for p in s.outputs))
        return any(
            all((made := _made_of(node, call, own, s, rank)) is not None and made.same for rank in range(REPLICAS))
            for s in partial
        )

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
                    self.states[self._key(value)] = REPLICATE
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
        state = self.states.get(self._key(value))
        if not isinstance(state, (Additive, Proportional)):
            return None
        combine = {0: Combine.SUM, 1: Combine.MEAN}.get(power_of_additive(state) or 0)
        floating = value.meta["val"].is_floating_point()
        return Statistic(node, value, combine) if combine is Combine.SUM or floating else None

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
        if not isinstance(self.states.get(step.reads[0]), Shard) or not node.users:
            return None
        for user in node.users:
            if not isinstance(user.target, WholeBatch):
                self.statistics[user, node] = Statistic(user, node, combine)
        return [REPLICATE]

    # ---- writes ----

    def _lose(self, step: Step) -> None:
        """Whatever shares memory to which something unknown is written is unknown from then on."""
        if written := {self._memory[each] for each in writes(self._nodes[step.name])}:
            self._gone |= {key_of(node) for node, memory in self._memory.items() if memory in written}
            self.states = {key: state for key, state in self.states.items() if key not in self._gone}

    def _write(self, step: Step) -> None:
        """What is written to a buffer must be alike for all parts."""
        node = self._nodes[step.name]
        if step.call.op in ("leaf", "function"):  # of which only the user knows what it writes
            return
        for memory in {self._memory[each] for each in writes(node)}:
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            if all(self.states.get(key) == REPLICATE for key in step.gives) and key_of(memory) in self.states:
                continue
            self._buffers.setdefault(str(memory.meta["role"][1]), step.name)
            self._gone |= {key_of(other) for other, of in self._memory.items() if of is memory}
            self.states = {key: state for key, state in self.states.items() if key not in self._gone}

    # ---- the end ----

    def conclude(self) -> Derivation:
        """What all this says of the loss."""
        output = self.graph.code.fx.output_node()
        results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
        wanted = 1 if self.graph.mean else 0
        culprit: Node | None = None
        for result in results:
            power = power_of_additive(self.states.get(self._key(result)))
            if power is None or (power != wanted and not self.counting):
                culprit = culprit or self._first_unknown(result)
            elif power != wanted:
                self.rescaled[output, result] = Rescale(output, result, wanted - power)
        buffer = next(iter(self._buffers.items()), None)
        return Derivation(
            states=self.states,
            orders=self._orders(),
            statistics=tuple(self.statistics.values()),
            rescaled=tuple(self.rescaled.values()),
            culprit=culprit,
            why="" if culprit is None else self._why(culprit),
            buffer=None if buffer is None else (buffer[0], self._described[buffer[1]]),
            counters=tuple(self._counters(results)),
            unproven=tuple(self.unproven),
        )

    def _orders(self) -> dict[str, Order]:
        orders = {}
        for name in self.graph.positions:
            key = self.view.aliases.get(name, (name, 0))
            state = self.states.get(key)
            if state is None or key in self.numbers:
                continue
            if isinstance(state, (Shard, Replicate)):
                if state == self.lies[key]:
                    orders[name] = Order.ALIKE if state == REPLICATE else Order.ROWS
            elif power_of_additive(state) in (0, 1):
                orders[name] = Order.MEAN if power_of_additive(state) else Order.SUM
        return orders

    def _first_unknown(self, result: fx.Node) -> Node:
        """The first operator on the way to a result of whose value nothing is known, though of all that it reads."""
        needed = _ancestors([result])
        order = [n for n in self.graph.code.fx.nodes if n in needed and n.op == "call_function"]
        for node in order:
            if not isinstance(node.meta.get("val"), (Tensor, list, tuple)):
                continue
            if self._key(node) not in self.states:
                return self._described[str(node.meta["name"])]
        return self._described[str(order[-1].meta["name"])] if order else self.graph.nodes[-1]

    def _why(self, node: Node) -> str:
        return "own Python" if node.op in ("leaf", "function") else "" if node.shape else "scalar"

    def _counters(self, results: Sequence[fx.Node]) -> Iterator[tuple[str, Node]]:
        """Buffers that are written once for each part, and by nothing that moves microbatch by microbatch anyhow.

        Where batch statistics move running averages, numbers that count the passes move with them.
        """
        needed = _ancestors(results)
        for node in self.graph.code.fx.nodes:
            for written in writes(node) if op_of(node).startswith("aten.") else ():
                memory = self._memory[written]
                if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                    continue
                matters = any(n in needed for n, of in self._memory.items() if of is memory)
                counts_passes = self.graph.code.batch_statistics and not memory.meta["val"].is_floating_point()
                if matters or not counts_passes:
                    yield str(memory.meta["role"][1]), self._described[str(node.meta["name"])]


def _ancestors(results: Sequence[fx.Node]) -> set[fx.Node]:
    found, left = set[fx.Node](), list(results)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def given_by_inputs(code: fx.Graph) -> set[fx.Node]:
    """Nodes that the batch alone decides, with constants and buffers that nobody writes: no parameter, no chance."""
    memory = alias_groups(code)
    written = {memory[each] for node in code.nodes for each in writes(node)}
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


def _has_nodes(value: Any) -> bool:
    """Whether a call has a number among its arguments of which nothing is known but that it depends on data."""
    if isinstance(value, Mapping):
        return any(_has_nodes(v) for v in value.values())
    if isinstance(value, (list, tuple)):
        return any(_has_nodes(v) for v in value)
    return isinstance(value, fx.Node)


def _base(node: Any) -> str:
    return op_of(node).split(".")[1] if isinstance(node, fx.Node) and op_of(node).startswith("aten.") else ""


def _copies(call: Call) -> bool:
    """Whether an operator gives the same numbers, in a type that holds them: whole numbers add up as others do."""
    if call.base not in _COPYING or not call.inputs or call.written:
        return False
    to, of = call.outputs[0].dtype, call.inputs[0].dtype
    return to.is_floating_point or to.is_complex or to == of or (of is torch.bool and not to.is_floating_point)


def _same_numbers(call: Call, own: Call) -> bool:
    """Whether two calls have the same numbers among their arguments."""

    def plain(value: Any) -> Any:
        if isinstance(value, Value):
            return None
        if isinstance(value, (list, tuple)):
            return [plain(v) for v in value]
        return value

    return all(plain(call.arguments[name]) == plain(own.arguments[name]) for name in call.arguments)


def _product(left: State, right: State, sign: int) -> Sequence[State | None] | None:
    """A product (sign 1) or quotient (sign -1) of two numbers."""
    a, b = power_of_proportional(left), power_of_proportional(right)
    if a is not None and b is not None:
        return [proportional(a + sign * b)]
    if b is not None and isinstance(left, Additive):
        return [Additive(left.power - sign * b)]
    if a is not None and isinstance(right, Additive) and sign == 1:
        return [Additive(right.power - a)]
    return None


def _selects(call: Call) -> bool:
    """Whether an operator gives the rows that a mask selects."""
    if call.base == "masked_select":
        return True
    if call.base != "index":
        return False
    indices = [i for i in call["indices"] if i is not None]
    return len(indices) == 1 and isinstance(indices[0], Value) and indices[0].dtype is torch.bool


def _is_ragged(val: Any) -> bool:
    """Whether a size of a tensor depends on data."""
    sizes = val.shape if isinstance(val, Tensor) else ()
    return any(isinstance(s, torch.SymInt) and bool(free_unbacked_symbols(s.node.expr)) for s in sizes)


def _in_order(val: Tensor) -> Placement | None:
    """How a tensor lies if it holds its samples in order, all with as many rows, or none of them; None: it cannot.

    Of a tensor whose rows a mask selected, the rows stand for the samples.
    """
    growing = [dim for dim, size in enumerate(val.shape) if grows(size)]
    if not growing:
        return REPLICATE
    of = size_function(val.shape[growing[0]], ragged=True)
    try:
        if len(growing) > 1 or any(of(samples) != samples * of(1) for samples in PROBES):
            return None
    except (ArithmeticError, TypeError):
        return None
    return Shard(growing[0], even(of(WHOLE), REPLICAS))


def _plain(placements: Sequence[Placement]) -> list[Placement]:
    """Without regard to gradients."""
    return [REPLICATE if isinstance(p, Replicate) else p for p in placements]


def _cuts(step: Step, states: Mapping[Key, State]) -> dict[Place, tuple[Cuts, ...]]:
    """How the dimensions of what an operator reads are cut."""
    placed = [(number, states[key]) for number, key in enumerate(step.reads)]
    return {("in", number, p.dim): (p.cuts,) for number, p in placed if isinstance(p, Shard)}


def _gives(strategy: Strategy, call: Call, own: Call) -> bool:
    """Whether each of two ranks has what a replica has, and no mere summand of it."""
    every = list(zip(strategy.outputs, call.outputs, own.outputs, strict=True))
    return all(local_shape(whole.shape, p, rank) == part.shape for p, whole, part in every for rank in range(REPLICAS))


def _as_replicas(node: fx.Node, call: Call, own: Call, strategy: Strategy) -> bool:
    """Whether each of two ranks computes what a replica with its samples does."""
    target = innermost(node.target)
    if isinstance(target, PerPart) or not call.op.startswith("aten."):
        return False  # numbers that each part draws for itself; the user's own Python
    if target is batch_norm:
        return True  # replicas share their statistics
    cut = any(isinstance(p, Shard) for p in strategy.outputs)
    if call.prefix and (node.args[2] is not None) is not cut:
        return False  # the numbers drawn are not the samples' own
    return all(
        (made := _made_of(node, call, own, strategy, rank)) is not None and made.same for rank in range(REPLICAS)
    )


@dataclass(frozen=True)
class _Made:
    """What a rank calls, held against what a replica with its samples calls.

    Attributes:
        same: it is the same call.
        share_of_mean: it is the rank's share of a mean over all samples.
    """

    same: bool
    share_of_mean: bool


def _made_of(node: fx.Node, call: Call, own: Call, strategy: Strategy, rank: int) -> _Made | None:
    """How the call of one of two ranks compares with a replica's; None where it is more than one operator."""
    graph, names = fx.Graph(), bound(node, node.args, node.kwargs)[2]
    tensors = [graph.placeholder(f"x{value.index}") for value in call.inputs]
    prefix = fx.map_arg(node.args[: call.prefix], lambda n: graph.placeholder(n.name))

    def edit(of: Call, outputs: Sequence[Placement]) -> Edit:
        given = [{"": placement} for placement in outputs]
        return Edit(of, graph, node.target, prefix, _on(tensors, of.arguments), names, given, {"": rank})

    changed = edit(call, strategy.outputs)
    if strategy.local is not None:
        changed.index, changed.strategy, changed.axis = rank, strategy, graph.placeholder("axis")
        strategy.local(changed)
    before = list(graph.nodes)
    made = changed.emit()
    added = [n for n in graph.nodes if n not in before]
    plain = edit(own, strategy.outputs).emit()
    if any(n.op != "placeholder" for n in before) or len(added) > 2:
        return None
    if len(added) == 2:  # the share, times what is the replica's own mean
        inner = added[0]
        is_share = made.target is operator.mul and made.args == (1 / REPLICAS, inner)
        return _Made(False, is_share and _is_same(inner, plain, tensors, call, own))
    is_mean = isinstance(made.target, Mean) and (made.args, made.kwargs) == (plain.args, plain.kwargs)
    return _Made(_is_same(made, plain, tensors, call, own), is_mean)


def _is_same(made: fx.Node, plain: fx.Node, tensors: Sequence[fx.Node], call: Call, own: Call) -> bool:
    if innermost(made.target) is innermost(plain.target) and (made.args, made.kwargs) == (plain.args, plain.kwargs):
        return True
    if made.target is aten.slice.Tensor and call.base == "slice":
        return bool(made.args == (tensors[0], *_stretch(own)))
    in_general = (made.target is aten.reshape.default and call.base in _REFORMING) or (
        made.target is aten.expand.default and call.base in _EXPANDING
    )
    return in_general and bool(made.args == (tensors[0], list(own.outputs[0].shape)))


def _on(tensors: Sequence[fx.Node], value: Any) -> Any:
    """A call's arguments, on tensors of a graph."""
    if isinstance(value, Value):
        return tensors[value.index]
    if isinstance(value, (list, tuple)):
        return [_on(tensors, each) for each in value]
    return {key: _on(tensors, each) for key, each in value.items()} if isinstance(value, dict) else value


def _stretch(call: Call) -> tuple[int, int, int, int]:
    """Along which dimension a slice goes, from where, to where, by which steps."""
    dim = call["dim"] % call["self"].dim
    return dim, *slice(call["start"], call["end"], call["step"]).indices(call["self"].shape[dim])
