"""A split in words: how every module is computed, what travels after it, and which parameters stay whole, and why."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from polylane.cost import communicate
from polylane.cost.redistribution import redistribute
from polylane.placement.options import Options
from polylane.placement.placement import SHARED, Placement, Replicate, Shard
from polylane.placement.rewrite import Split
from polylane.placement.view import Key, Source, Step
from polylane.planner.price import Moving, Setting, bytes_of, moves, parameter_bytes
from polylane.planner.solve import OPTIMAL, Report, Solved

# An operator with so many operations for each element that it gives is worth a word, even without parameters.
HEAVY = 16

T = TypeVar("T")


@dataclass(frozen=True)
class Collective:
    """What travels.

    Attributes:
        name: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "exchange": what an operator does inside.
        backward: whether it carries a gradient.
        sent: bytes that every rank sends.
        what: "" for what the module gives, a parameter's name, or an operator.
    """

    name: str
    backward: bool
    sent: float
    what: str = ""


@dataclass(frozen=True)
class ModuleSplit:
    """One module, or several that are split alike.

    Attributes:
        module: the user's path; "blocks.0-47.mlp" for many.
        operators: (operator, strategy in words) of those with parameters or much work.
        collectives: that its parameters, its operators and what it gives need.
    """

    module: str
    operators: tuple[tuple[str, str], ...]
    collectives: tuple[Collective, ...]


@dataclass(frozen=True)
class Kept:
    """A parameter, or several alike, that every rank has whole.

    Attributes:
        parameter: its name; "blocks.0-47.norm.weight" for many.
        bytes: of each.
        reason: why it is not cut.
    """

    parameter: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Explanation:
    """All of a split.

    Attributes:
        degree: ranks.
        modules: in the order of the graph.
        parameters, whole: bytes of the parameters on the busiest rank, and altogether.
        summed: bytes of the parameters whose gradients are summed over the ranks once a step.
        kept: the parameters that every rank has whole although the axis is there to cut them.
        report: how the split was found; None for one that was not searched for.
    """

    degree: int
    modules: tuple[ModuleSplit, ...]
    parameters: float
    whole: float
    summed: float
    kept: tuple[Kept, ...]
    report: Report | None = None


def explain(
    setting: Setting,
    split: Split,
    options: Options,
    *,
    purpose: str,
    pins: Mapping[str, str] | None = None,
    whole: Mapping[str, str] | None = None,
    only: Collection[str] | None = None,
) -> Explanation:
    """Tell what was chosen.

    Args:
        setting: what the split was chosen for.
        split: the choice.
        options: all that the rules offered.
        purpose, pins: as for :func:`~polylane.planner.solve.solve`.
        whole: parameters that every rank has whole for their optimizer's sake, and why.
        only: tell of these nodes and parameters, by name; default: of all.
    """
    reasons = {**dict.fromkeys(pins or {}, "pinned"), **(whole or {})}
    parameters = {
        key: s
        for key, s in setting.view.sources.items()
        if s.role[0] == "parameter" and (only is None or s.role[1] in only)
    }
    summed = [key for key, s in parameters.items() if split.sources[key] == SHARED and s.value.gradient]
    return Explanation(
        setting.degree,
        tuple(_modules(setting, split, only)),
        sum(parameter_bytes(setting, s, split.sources[key]) for key, s in parameters.items()),
        sum(setting.size(key) for key in parameters),
        sum(setting.size(key) for key in summed),
        tuple(_kept(setting, split, options, reasons, parameters)) if purpose == "tensor" else (),
        split.report if isinstance(split, Solved) else None,
    )


def lines(explanation: Explanation) -> list[str]:
    """An explanation as lines of text."""
    found = [_line(module) for module in explanation.modules]
    share = 100 * explanation.parameters / max(explanation.whole, 1)
    found.append(
        f"parameters: {_size(explanation.parameters)} on each of {explanation.degree} ranks,"
        f" {share:.0f} % of {_size(explanation.whole)}"
    )
    if explanation.summed:
        found.append(f"gradients of {_size(explanation.summed)} of parameters are summed once a step")
    found += [f"whole on every rank: {k.parameter} ({_size(k.bytes)}): {k.reason}" for k in explanation.kept]
    if explanation.report is not None and explanation.report.status != OPTIMAL:
        found.append(_unproven(explanation.report))
    return found


def _unproven(report: Report) -> str:
    """What is known of a split that need not be the best."""
    if report.gap < 1:
        known = f"by the model it is within {100 * report.gap:.2g} % of it"
    else:
        known = "how far from it is not known"
    return f"the search for the best split {report.status} after {report.seconds:.0f} s: {known}"


def _line(split: ModuleSplit) -> str:
    words = [in_words(name) for _, name in split.operators]
    if len(set(words)) > 1:
        words = [f"{op} {in_words(name)}" for op, name in split.operators]
    parts = [", ".join(dict.fromkeys(words))] if words else []
    for backward, text in ((False, "then"), (True, "backward")):
        told = [_told(c) for c in split.collectives if c.backward == backward]
        if told:
            parts.append(f"{text} {', '.join(told)}")
    return f"{split.module or 'model'}: {'; '.join(parts)}"


def in_words(strategy: str) -> str:
    """A strategy's name as people read it."""
    if strategy.startswith("dim "):
        return f"cut along {strategy}"
    return _WHOLE.get(strategy, strategy)


_WHOLE = {
    "replicate": "whole on every rank",
    "replicate, with partial gradients": "whole on every rank, gradients in summands",
}


def _told(collective: Collective) -> str:
    of = f" of {collective.what}" if collective.what else ""
    return f"{collective.name.replace('_', '-')}{of} ({_size(collective.sent)})"


def _size(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 999.5:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"


# ---- modules ---------------------------------------------------------------------------------------------------------


def _modules(setting: Setting, split: Split, only: Collection[str] | None) -> Iterable[ModuleSplit]:
    owner = {step.name: step.module for step in setting.view.steps}
    operators: dict[str, list[tuple[str, str]]] = {}
    collectives: dict[str, list[Collective]] = {}
    order: dict[str, None] = {}
    for step in (s for s in setting.view.steps if only is None or s.name in only):
        order[step.module] = None
        strategy = split.steps[step.name]
        if _notable(step):
            operators.setdefault(step.module, []).append((step.call.base, strategy.name))
        if strategy.sent:
            collectives.setdefault(step.module, []).append(
                Collective("exchange", False, strategy.sent, f"{step.call.base}, both ways")
            )
    for moving in moves(setting, split):
        reader = next((use.step.module for use in moving.uses if use.step is not None), "")
        module = owner.get(moving.key[0], reader)
        if only is None or any(use.step is not None and use.step.name in only for use in moving.uses):
            collectives.setdefault(module, []).extend(_collectives(setting, moving))
    found = [ModuleSplit(m, tuple(operators.get(m, ())), tuple(collectives.get(m, ()))) for m in order]
    kept = [m for m in found if m.operators or m.collectives]
    names = _folded((m.module, (m.operators, m.collectives)) for m in kept)
    return [ModuleSplit(name, *content) for name, content in names]


def _notable(step: Step) -> bool:
    elements = sum(bytes_of(v) // v.dtype.itemsize for v in step.call.outputs)
    return any(key[0].startswith("parameter:") for key in step.reads) or step.flops >= HEAVY * max(elements, 1)


def _collectives(setting: Setting, moving: Moving) -> list[Collective]:
    size, degree = setting.size(moving.key), setting.degree
    kind, _, name = moving.key[0].partition(":")
    what = name.rpartition(".")[2] if kind in ("parameter", "buffer", "input", "constant") else ""
    flows = setting.values[moving.key].gradient
    passes = redistribute(size, moving.source, moving.target, flows)
    return [
        Collective(name, bool(back), communicate.sent(name, size, degree), what)
        for back, (name, _) in enumerate(passes)
        if name
    ]


# ---- parameters that stay whole --------------------------------------------------------------------------------------


def _kept(
    setting: Setting, split: Split, options: Options, reasons: Mapping[str, str], parameters: Mapping[Key, Source]
) -> Iterable[Kept]:
    found = []
    for key, source in parameters.items():
        if isinstance(split.sources[key], Replicate):
            name = str(source.role[1])
            reason = _reason(setting, split, options.sources[key], name, reasons)
            found.append((name, (bytes_of(source.value), reason)))
    return [Kept(name, size, reason) for name, (size, reason) in _folded(found)]


def _reason(
    setting: Setting,
    split: Split,
    offered: Sequence[Placement],
    name: str,
    reasons: Mapping[str, str],
) -> str:
    if name in reasons:
        return reasons[name]
    key = (f"parameter:{name}", 0)
    readers = [use for use in setting.uses[key] if use.step is not None]
    cuts = [p for p in offered if isinstance(p, Shard)]
    if not cuts:
        if any(use.step.pinned for use in readers if use.step is not None):
            return "its operator runs whole on every rank"
        bases = dict.fromkeys(use.step.call.op for use in readers if use.step is not None)
        return f"no rule cuts it in {', '.join(bases)}"
    others = [s.sources[key] for s in setting.taken.values()]
    if all(any(isinstance(o, Shard) and o.dim == c.dim for o in others) for c in cuts):
        return "another axis cuts it"
    whole = {
        split.steps[use.step.name].name: use.step.call.base
        for use in readers
        if use.step is not None and not isinstance(split.steps[use.step.name].inputs[use.index], Shard)
    }
    told = ", ".join(f"{base} needs it whole ({in_words(strategy)})" for strategy, base in whole.items())
    return f"smaller than what a cut would cost: {told}" if told else "smaller than what a cut would cost"


# ---- folding ---------------------------------------------------------------------------------------------------------


def _folded(entries: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Names that differ in their first number only, and say the same, as one: "blocks.0-47.mlp"."""
    groups: dict[object, tuple[list[int], T, str]] = {}
    for name, content in entries:
        match = re.search(r"(?<![^.])\d+(?![^.])", name)
        pattern = f"{name[: match.start()]}*{name[match.end() :]}" if match else name
        numbers, _, _ = groups.setdefault((pattern, content), ([], content, pattern))
        if match:
            numbers.append(int(match.group()))
    return [
        (pattern.replace("*", _ranges(numbers), 1) if numbers else pattern, content)
        for numbers, content, pattern in groups.values()
    ]


def _ranges(numbers: Sequence[int]) -> str:
    ordered = sorted(set(numbers))
    runs = [list(run) for _, run in groupby(enumerate(ordered), lambda pair: pair[1] - pair[0])]
    ends = [(run[0][1], run[-1][1]) for run in runs]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ends)
