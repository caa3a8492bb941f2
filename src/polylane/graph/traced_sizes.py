"""Traced sizes: integers that record what is computed with them, so that a result for one size serves others, too.

Code that works with concrete sizes (the sharding rules, the rewriting of a graph) runs once on traced ones. Each has a
value, with which all decisions are made, and a formula. A decision is recorded as a guard; whatever was computed holds
for all sizes at which every guard comes out as it did, with each formula evaluated there (as in ``torch.fx``'s symbolic
shapes, without their cost):

    length = 48          even_cuts(length, 2)  ->  0, (length + 1) // 2, (length + 1) // 2 + length // 2
    length > 1           guard: 1 < length
    list(range(length))  guard: length == 48, which makes the result one for this length alone
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

N = TypeVar("N", int, float)  # traced or not: a traced size is declared as the number that it stands for

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "/": operator.truediv,
    "**": operator.pow,
    "max": max,
    "min": min,
}
_COMPARISONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "<": operator.lt,
    "<=": operator.le,
}


class SizeTrace:
    """What was computed and decided with some sizes.

    Args:
        values: the sizes at which decisions are made, as plain numbers.

    Attributes:
        sizes: the traced sizes themselves.
        is_open: whether decisions are recorded.
    """

    def __init__(self, values: Sequence[int]) -> None:
        self._known: dict[str, TracedSize] = {}  # by formula
        self._lines: list[tuple[str, str]] = []  # formulas as (name, source) and guards as ("", source), in order
        self._guards = set[str]()
        self.is_open = True
        self.sizes = tuple(TracedSize(self, value, f"n{i}") for i, value in enumerate(values))

    def close(self) -> None:
        """End the recording: a later decision is an error."""
        self.is_open = False

    def compute(self, sign: str, left: Any, right: Any) -> TracedSize:
        """Return the traced result of an arithmetic operator, the same one for the same operands."""
        a, b = _source(left), _source(right)
        source = f"{sign}({a}, {b})" if sign in ("max", "min") else f"{a} {sign} {b}"
        if source not in self._known:
            self._write(source, _ARITHMETIC[sign](value_of(left), value_of(right)))
        return self._known[source]

    def convert(self, kind: type, of: TracedSize) -> TracedSize:
        """Return a traced size as another type of number: int or float."""
        source = f"{kind.__name__}({of.name})"
        if source not in self._known:
            self._write(source, kind(of.value))
        return self._known[source]

    def _write(self, source: str, value: Any) -> None:
        self._known[source] = size = TracedSize(self, value, f"v{len(self._known)}")
        self._lines.append((size.name, source))

    def decide(self, sign: str, left: Any, right: Any) -> bool:
        """Return the result of a comparison, and record it as a guard."""
        result = _COMPARISONS[sign](value_of(left), value_of(right))
        guard = f"{_source(left)} {sign} {_source(right)}"
        guard = guard if result else f"not {guard}"
        if guard not in self._guards:
            if not self.is_open:
                raise AssertionError(f"the size {value_of(left)} is decided on ({guard}) where it may be any other")
            self._guards.add(guard)
            self._lines.append(("", guard))
        return result

    def fix(self, size: TracedSize) -> Any:
        """Return a traced size as a plain number; what is computed then holds for this value of it alone."""
        self.decide("==", size, size.value)
        return size.value

    def compile_guards(self) -> Callable[[Sequence[int]], bool]:
        """Return the function that tells whether all decisions are the same at other sizes."""
        body = [f"{name} = {source}" if name else f"if not ({source}): return False" for name, source in self._lines]
        decide = _compile(len(self.sizes), body, "True")

        def admit(sizes: Sequence[int]) -> bool:
            try:
                return bool(decide(*sizes))
            except (ArithmeticError, ValueError):  # a formula without a value there
                return False

        return admit

    def compile_values(self, formulas: Iterable[TracedSize]) -> Callable[..., tuple[Any, ...]]:
        """Return the function from other sizes to the values of these formulas."""
        names = [size.name for size in formulas]
        sources, needed, waiting = dict(self._lines), dict[str, None](), list(names)
        while waiting:
            name = waiting.pop()
            if name in sources and name not in needed:
                needed[name] = None
                waiting += re.findall(r"v\d+", sources[name])
        body = [f"{name} = {source}" for name, source in self._lines if name in needed]
        return _compile(len(self.sizes), body, f"({''.join(f'{name}, ' for name in names)})")


def value_of(size: Any) -> Any:
    """Return the value with which a traced size is decided; another number as it is."""
    return size.value if isinstance(size, TracedSize) else size


def _source(number: Any) -> str:
    return number.name if isinstance(number, TracedSize) else f"({number!r})" if number < 0 else repr(number)


def _compile(count: int, body: Sequence[str], result: str) -> Callable[..., Any]:
    arguments = ", ".join(f"n{i}" for i in range(count))
    lines = [f"def compute({arguments}):", *(f"    {line}" for line in body), f"    return {result}"]
    scope: dict[str, Any] = {"inf": math.inf, "nan": math.nan}  # as repr() writes these numbers
    exec("\n".join(lines), scope)
    function: Callable[..., Any] = scope["compute"]
    return function


class TracedSize:
    """An integer with a formula; arithmetic gives further ones, comparisons and conversions are recorded as guards.

    Args:
        trace: the trace to which its formula belongs.
        value: the number that it has where the trace was recorded.
        name: its name in the trace's formulas.
    """

    __slots__ = ("name", "trace", "value")

    def __init__(self, trace: SizeTrace, value: Any, name: str) -> None:
        self.trace, self.value, self.name = trace, value, name

    def __repr__(self) -> str:
        return f"{self.name}={self.value}"

    # One hash for all sizes of a trace: in a dictionary they then are compared, and the comparisons recorded.
    def __hash__(self) -> int:
        return id(self.trace)

    def __eq__(self, other: object) -> Any:
        if self is other:
            return True
        if not self.trace.is_open or not _is_number(other, self.trace):
            return NotImplemented
        return self.trace.decide("==", self, other)

    def __lt__(self, other: Any) -> bool:
        return self.trace.decide("<", self, other)

    def __le__(self, other: Any) -> bool:
        return self.trace.decide("<=", self, other)

    def __gt__(self, other: Any) -> bool:
        return self.trace.decide("<", other, self)

    def __ge__(self, other: Any) -> bool:
        return self.trace.decide("<=", other, self)

    def __bool__(self) -> bool:
        return not self.trace.decide("==", self, 0)

    def __index__(self) -> int:
        return int(self.trace.fix(self))

    def __int__(self) -> int:
        return int(self.trace.fix(self))

    def __float__(self) -> float:
        return float(self.trace.fix(self))

    def __neg__(self) -> TracedSize:
        return self.trace.compute("-", 0, self)

    def __divmod__(self, other: Any) -> tuple[Any, Any]:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> tuple[Any, Any]:
        return other // self, other % self


def _is_number(value: object, trace: SizeTrace) -> bool:
    return value.trace is trace if isinstance(value, TracedSize) else isinstance(value, (int, float))


def _write_arithmetic(sign: str, name: str) -> None:
    def compute(self: TracedSize, other: Any) -> Any:
        if not _is_number(other, self.trace):  # a list that is repeated, say
            return NotImplemented
        return self.trace.compute(sign, self, other)

    def reflected(self: TracedSize, other: Any) -> Any:
        return self.trace.compute(sign, other, self) if _is_number(other, self.trace) else NotImplemented

    setattr(TracedSize, f"__{name}__", compute)
    setattr(TracedSize, f"__r{name}__", reflected)


for _sign, _function in _ARITHMETIC.items():
    if _sign not in ("max", "min"):
        _write_arithmetic(_sign, _function.__name__)


def traced_max(*numbers: N) -> N:
    """Return the largest of some numbers, as a formula where one of them is traced: no decision is recorded."""
    return reduce(partial(_choose, "max"), numbers)


def traced_min(*numbers: N) -> N:
    """Return the smallest of some numbers, as :func:`traced_max` does."""
    return reduce(partial(_choose, "min"), numbers)


def _choose(sign: str, left: Any, right: Any) -> Any:
    traced = next((operand for operand in (left, right) if isinstance(operand, TracedSize)), None)
    return _ARITHMETIC[sign](left, right) if traced is None else traced.trace.compute(sign, left, right)
