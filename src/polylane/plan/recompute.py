"""Recomputation as a plan says it: none, selective, full or within a budget of bytes; for all, or module by module."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeGuard, get_args

import pydantic
from pydantic_core import PydanticCustomError

from polylane.cluster.figures import figure
from polylane.errors import PolylaneError, format_value
from polylane.graph.graph import Node

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)
NONE = MODES[0]
BUDGET = "budget:"
WANTED = f"must be {', '.join(MODES)}, or a budget such as {BUDGET}200MB"
# The key of all that no other key names.
DEFAULT = "default"

# What a plan or a stage recomputes: one mode for all of it, or modes by path of the user's modules.
RecomputeRule = str | Mapping[str, str]

_MODULES = "or one of these for each module, as in {example}"
_IN_LINE = re.compile(rf"(?P<module>[^:].*?):(?P<mode>{'|'.join(MODES)}|{BUDGET}.+)")


def read_recompute(value: Any) -> str | dict[str, str]:
    """Validate what a plan file says of recomputation: a mode or a budget, or a mapping of module paths to these.

    Raises:
        PydanticCustomError: it is neither a mode or a budget, nor such a mapping.
    """
    if is_mode(value):
        return value
    if not isinstance(value, Mapping) or not value:
        requirement = f"{WANTED}, {_MODULES.format(example='{blocks.3: full}')}"
        raise PydanticCustomError("recompute", "{why}", {"why": f"{requirement}, not {format_value(value)}"})
    for module, mode in value.items():
        if not isinstance(module, str):
            why = f"{module} must be a name, in quotes where it reads like a number ('{module}')"
            raise PydanticCustomError("recompute", "{why}", {"why": why})
        if not is_mode(mode):
            why = f"{module} {WANTED}, not {format_value(mode)}"
            raise PydanticCustomError("recompute", "{why}", {"why": why})
    return _simplify(value)


def parse_recompute(text: str) -> str | dict[str, str]:
    """Parse what a plan of one line recomputes: ``full``, ``budget:200MB``, ``blocks.3:full+blocks.5:selective``.

    Raises:
        PolylaneError: it is none of these, or names a module twice.
    """
    if is_mode(text):
        return text
    modes = dict[str, str]()
    for piece in text.split("+"):
        match = _IN_LINE.fullmatch(piece.strip())
        if match is None or not is_mode(match["mode"]):
            shown = text if len(text) <= 80 else f"{text[:80]}…"
            raise PolylaneError(f"recompute={shown} {WANTED}, {_MODULES.format(example='blocks.3:full+default:none')}")
        if match["module"] in modes:
            raise PolylaneError(f"recompute={text} names {match['module']} twice: keep one")
        modes[match["module"]] = match["mode"]
    return _simplify(modes)


def format_recompute(rule: RecomputeRule) -> str:
    """Format what a plan recomputes as in a plan of one line."""
    return rule if isinstance(rule, str) else "+".join(f"{module}:{mode}" for module, mode in rule.items())


def is_mode(value: object) -> TypeGuard[str]:
    """Return whether a value is one of :data:`MODES`, or a budget."""
    return isinstance(value, str) and (value in MODES or budget_bytes(value) is not None)


def budget_bytes(text: str) -> float | None:
    """Return the bytes that a microbatch may keep from its forward to its backward pass; None without a budget."""
    if not text.startswith(BUDGET):
        return None
    quantity = figure(text.removeprefix(BUDGET))
    return quantity[0] if quantity is not None and quantity[1] in ("size", None) and quantity[0] > 0 else None


def has_budget(rule: RecomputeRule) -> bool:
    """Return whether what a plan recomputes is within a budget, or that of one of its modules."""
    modes = [rule] if isinstance(rule, str) else rule.values()
    return any(budget_bytes(mode) is not None for mode in modes)


def without_budgets(rule: RecomputeRule) -> RecomputeRule:
    """Return what a plan recomputes where its budgets do not hold: nothing in their places."""
    if isinstance(rule, str):
        return NONE if has_budget(rule) else rule
    return _simplify({module: NONE if has_budget(mode) else mode for module, mode in rule.items()})


def nodes_by_key(rule: Mapping[str, str], nodes: Iterable[Node]) -> dict[str, set[str]]:
    """Return the names of the nodes that each key speaks of: the innermost module that a key names decides.

    Args:
        rule: modes by module path; what no key names is under :data:`DEFAULT`.
        nodes: the nodes of a stage.
    """
    names = dict[str, set[str]]()
    for node in nodes:
        path = node.module
        while path and path not in rule:
            path = path.rpartition(".")[0]
        names.setdefault(path or DEFAULT, set()).add(node.name)
    return names


def _simplify(modes: Mapping[str, str]) -> str | dict[str, str]:
    """Return one mode where it is said of the rest alone: one form, so that equal plans compare equal."""
    return modes[DEFAULT] if list(modes) == [DEFAULT] else dict(modes)


Recompute = Annotated[str | dict[str, str], pydantic.BeforeValidator(read_recompute)]
