"""Explanation of a split in words: how modules are computed, their collectives, and why parameters stay replicated."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from polylane.cost.network import alpha_beta as communicate
from polylane.cost.network.redistribution import redistribute
from polylane.observe.swimlane.layout import format_bytes
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import GraphInput, OperatorNode, TensorKey
from polylane.placement.placement import (
    REPLICATE_PARTIAL_GRAD,
    Placement,
    Replicate,
    Shard,
    contiguous_ranges,
    shard_same_dim,
)
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.cost_model import CostSetting, PricedMove, list_redistributions, value_bytes
from polylane.sharding.solve import OPTIMAL, SolvedSplit, SolveReport

# An operator with this many operations for each output element is reported even if it has no parameters.
HEAVY = 16

T = TypeVar("T")


@dataclass(frozen=True)
class ExplainedCollective:
    """A collective as the report names it.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "exchange": communication inside an
            operator.
        backward: whether the collective carries a gradient.
        sent: bytes that every rank sends.
        what: the parameter's name or the operator; "" for the module's output.
    """

    name: str
    backward: bool
    sent: float
    what: str = ""


@dataclass(frozen=True)
class ModuleSplit:
    """One module, or several that are split alike.

    Attributes:
        module: the module's path in the user's model; "blocks.0-47.mlp" for many.
        operators: (operator, strategy's name) of those with parameters or much arithmetic.
        collectives: the communication of the module's parameters, operators and output.
    """

    module: str
    operators: tuple[tuple[str, str], ...]
    collectives: tuple[ExplainedCollective, ...]


@dataclass(frozen=True)
class WholeParameter:
    """A parameter, or several alike, that every rank holds whole.

    Attributes:
        parameter: the parameter's name; "blocks.0-47.norm.weight" for many.
        bytes: size of each such parameter.
        reason: why it is not sharded, as a clause.
    """

    parameter: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    """The explanation of one axis's split.

    Attributes:
        degree: number of ranks along the axis.
        modules: the modules in the order of the graph.
        parameters, whole: bytes of the parameters on the busiest rank, and of all of them.
        summed: bytes of the parameters whose gradients are all-reduced once a step.
        kept: parameters that every rank holds whole although the axis shards parameters.
        report: how the split was found; None for a split that was not searched for.
    """

    degree: int
    modules: tuple[ModuleSplit, ...]
    parameters: float
    whole: float
    summed: float
    kept: tuple[WholeParameter, ...]
    report: SolveReport | None = None


def explain(
    setting: CostSetting,
    split: AxisSplit,
    options: StrategyOptions,
    *,
    purpose: str,
    pins: Mapping[str, str] | None = None,
    whole: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> Explanation:
    """Explain a split module by module.

    Args:
        setting: the graph and prices that the split was chosen with.
        split: the chosen strategies and placements.
        options: all strategies that the rules offered.
        purpose, pins: with the same meaning as for :func:`~polylane.sharding.solve.solve`.
        whole: parameters that their optimizer needs whole on every rank, and the reason.
        only: node and parameter names to restrict the report to; default: all of them.
    """
    reasons = {**dict.fromkeys(pins or {}, "pinned"), **(whole or {})}
    parameters = {
        key: s
        for key, s in setting.view.sources.items()
        if s.role[0] == "parameter" and (only is None or s.role[1] in only)
    }
    all_reduced = [key for key in parameters if split.source_placements[key] == REPLICATE_PARTIAL_GRAD]
    return Explanation(
        setting.degree,
        tuple(_explain_modules(setting, split, only)),
        sum(setting.parameter_bytes(s, split.source_placements[key]) for key, s in parameters.items()),
        sum(setting.tensor_bytes(key) for key in parameters),
        sum(setting.tensor_bytes(key) for key in all_reduced if parameters[key].value.gradient),
        tuple(_whole_parameters(setting, split, options, reasons, parameters)) if purpose == "tensor" else (),
        split.report if isinstance(split, SolvedSplit) else None,
    )


def format_explanation(explanation: Explanation) -> list[str]:
    """Return an explanation as lines of text."""
    lines = [_format_module(module) for module in explanation.modules]
    share = 100 * explanation.parameters / max(explanation.whole, 1)
    lines.append(
        f"parameters: {format_bytes(explanation.parameters)} on each of {explanation.degree} ranks,"
        f" {share:.0f} % of {format_bytes(explanation.whole)}"
    )
    if explanation.summed:
        lines.append(f"gradients of {format_bytes(explanation.summed)} of parameters are summed once a step")
    lines += [f"whole on every rank: {k.parameter} ({format_bytes(k.bytes)}): {k.reason}" for k in explanation.kept]
    if explanation.report is not None and explanation.report.status != OPTIMAL:
        lines.append(_describe_gap(explanation.report))
    return lines


def _describe_gap(report: SolveReport) -> str:
    """Return what is known of a split that need not be the best."""
    if report.gap < 1:
        gap = f"by the model it is within {100 * report.gap:.2g} % of it"
    else:
        gap = "how far from it is not known"
    return f"the search for the best split {report.status} after {report.seconds:.0f} s: {gap}"


def _format_module(split: ModuleSplit) -> str:
    words = [describe_strategy(name) for _, name in split.operators]
    if len(set(words)) > 1:
        words = [f"{op} {describe_strategy(name)}" for op, name in split.operators]
    parts = [", ".join(dict.fromkeys(words))] if words else []
    for backward, text in ((False, "then"), (True, "backward")):
        descriptions = [_describe_collective(c) for c in split.collectives if c.backward == backward]
        if descriptions:
            parts.append(f"{text} {', '.join(descriptions)}")
    return f"{split.module or 'model'}: {'; '.join(parts)}"


def describe_strategy(strategy: str) -> str:
    """Return a strategy's name as users read it."""
    if strategy.startswith("dim "):
        return f"cut along {strategy}"
    return _WHOLE.get(strategy, strategy)


_WHOLE = {
    "replicate": "whole on every rank",
    "replicate, with partial gradients": "whole on every rank, gradients in summands",
}


def _describe_collective(collective: ExplainedCollective) -> str:
    of = f" of {collective.what}" if collective.what else ""
    return f"{collective.name.replace('_', '-')}{of} ({format_bytes(collective.sent)})"


# ---- modules ---------------------------------------------------------------------------------------------------------


def _explain_modules(setting: CostSetting, split: AxisSplit, only: Collection[str] | None) -> Iterable[ModuleSplit]:
    owner = {step.name: step.module for step in setting.view.operators}
    modules: dict[str, tuple[list[tuple[str, str]], list[ExplainedCollective]]] = {}
    for step in (s for s in setting.view.operators if only is None or s.name in only):
        operators, collectives = modules.setdefault(step.module, ([], []))
        strategy = split.strategies[step.name]
        if _is_notable(step):
            operators.append((step.call.base, strategy.name))
        if strategy.sent:
            collectives.append(ExplainedCollective("exchange", False, strategy.sent, f"{step.call.base}, both ways"))
    for moving in list_redistributions(setting, split):
        reader = next((use.step.module for use in moving.uses if use.step is not None), "")
        # A redistribution belongs to the module that makes the tensor; that of a parameter, to its first reader.
        module = owner.get(moving.key[0], reader)
        is_told = only is None or any(use.step is not None and use.step.name in only for use in moving.uses)
        if is_told and module in modules:
            modules[module][1].extend(_explain_redistribution(setting, moving))
    contents = ((module, (tuple(ops), tuple(moves))) for module, (ops, moves) in modules.items() if ops or moves)
    return [ModuleSplit(name, *content) for name, content in _merge_alike(contents)]


def _is_notable(step: OperatorNode) -> bool:
    elements = sum(value_bytes(v) // v.dtype.itemsize for v in step.call.outputs)
    return any(key[0].startswith("parameter:") for key in step.input_keys) or step.flops >= HEAVY * max(elements, 1)


def _explain_redistribution(setting: CostSetting, moving: PricedMove) -> list[ExplainedCollective]:
    size, degree = setting.tensor_bytes(moving.key), setting.degree
    kind, _, name = moving.key[0].partition(":")
    label = name.rpartition(".")[2] if kind in ("parameter", "buffer", "input", "constant") else ""
    flows = setting.values[moving.key].gradient
    passes = redistribute(size, moving.source, moving.target, flows)
    return [
        ExplainedCollective(name, bool(back), communicate.bytes_per_rank(name, size, degree), label)
        for back, (name, _) in enumerate(passes)
        if name
    ]


# ---- parameters that stay whole --------------------------------------------------------------------------------------


def _whole_parameters(
    setting: CostSetting,
    split: AxisSplit,
    options: StrategyOptions,
    reasons: Mapping[str, str],
    parameters: Mapping[TensorKey, GraphInput],
) -> Iterable[WholeParameter]:
    rows = []
    for key, source in parameters.items():
        if isinstance(split.source_placements[key], Replicate):
            name = str(source.role[1])
            reason = reasons.get(name) or _why_whole(setting, split, options.source_placements[key], key)
            rows.append((name, (value_bytes(source.value), reason)))
    return [WholeParameter(name, size, reason) for name, (size, reason) in _merge_alike(rows)]


def _why_whole(setting: CostSetting, split: AxisSplit, offered: Sequence[Placement], key: TensorKey) -> str:
    readers = [(use.step, use.index) for use in setting.uses[key] if use.step is not None]
    # Reasons from the most to the least binding: no rule shards it, another axis does, or a cut would cost more.
    cuts = [p for p in offered if isinstance(p, Shard)]
    if not cuts:
        if any(step.is_pinned for step, _ in readers):
            return "its operator runs whole on every rank"
        return f"no rule cuts it in {', '.join(dict.fromkeys(step.call.op for step, _ in readers))}"
    other_placements = [s.source_placements[key] for s in setting.other_axes.values()]
    if all(any(shard_same_dim(placement, cut) for placement in other_placements) for cut in cuts):
        return "another axis cuts it"
    bases = {
        split.strategies[step.name].name: step.call.base
        for step, index in readers
        if not isinstance(split.strategies[step.name].inputs[index], Shard)
    }
    reasons = ", ".join(f"{base} needs it whole ({describe_strategy(strategy)})" for strategy, base in bases.items())
    return f"smaller than what a cut would cost: {reasons}" if reasons else "smaller than what a cut would cost"


# ---- folding ---------------------------------------------------------------------------------------------------------


def _merge_alike(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Merge entries that differ only in the first number of their names: "blocks.0-47.mlp"."""
    groups: dict[object, tuple[list[int], T, str]] = {}
    for name, content in entries:
        # A number that is a whole path component, as in "blocks.3.mlp", not the 2 of "conv2".
        match = re.search(r"(?<![^.])\d+(?![^.])", name)
        pattern = f"{name[: match.start()]}*{name[match.end() :]}" if match else name
        numbers, _, _ = groups.setdefault((pattern, content), ([], content, pattern))
        if match:
            numbers.append(int(match.group()))
    return [
        (pattern.replace("*", _format_ranges(numbers), 1) if numbers else pattern, content)
        for numbers, content, pattern in groups.values()
    ]


def _format_ranges(numbers: Iterable[int]) -> str:
    return ",".join(str(a) if a + 1 == b else f"{a}-{b - 1}" for a, b in contiguous_ranges(numbers))
