"""Keyed draws: the user's own code gets the random numbers that the plan draws, in the place of torch's.

In a captured graph every random operator has a key (:mod:`polylane.graph.capture.assign_keys`), so that its numbers
depend on no rank. The user's code draws in the order in which it was captured: its k-th draw gets the numbers of the
k-th keyed operator. Torch makes up dropout, attention and recurrent layers from smaller operators, of which the draws
alone are replaced:

    in the graph                         what the user's code draws
    dropout, attention with dropout      bernoulli_(1 - p), once
    lstm, gru, rnn with dropout          bernoulli_(1 - p), once between two layers
    rand, normal_, multinomial, ...      the operator itself
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

from polylane.errors import PolylaneError
from polylane.graph.capture.assign_keys import KeyedInPlace, is_random
from polylane.graph.graph import Code
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.counter_rng import keep_mask
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.packed_recurrent import PackedRecurrent

_MASKED = ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout", "scaled_dot_product_attention")
_BY_CHANNEL = ("feature_dropout", "feature_alpha_dropout")
_RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
# Positions of arguments: of a recurrent operator, and of a dropout.
_LAYERS_AT, _RECURRENT_P_AT, _BATCH_FIRST_AT, _P_AT = 4, 5, 8, 1
_SAME = {
    "normal_functional": "normal"
}  # operators of a graph that are another one, written in place, in the user's code
_KEYED_FUNCTIONS = frozenset(KEYED.values())


class DrawsDiffer(PolylaneError):
    """The user's code draws other numbers than its captured graph, or in another order."""


@dataclass(frozen=True)
class _Draw:
    """One draw of the user's code.

    Attributes:
        operator: name of the operator that draws, without its overload and the mark of one that writes in place.
        fill: returns the numbers, from the sample slice and the operator's own arguments.
    """

    operator: str
    fill: Callable[..., Tensor]


def list_draws(code: Code) -> list[_Draw] | None:
    """Return the draws of the user's code, in order; None where some cannot be given keyed numbers.

    Of these are draws of the user's own Python (leaves, functions with ``random`` or numpy), packed recurrent layers,
    and kernels that draw inside.
    """
    code_draws = list[_Draw]()
    for node in code.fx.nodes:
        if node.op != "call_function":
            continue
        target = unwrap_settings(node.target)
        if isinstance(target, KeyedInPlace):
            target = target.function
        if target in _KEYED_FUNCTIONS:
            draws = list(_draws_of(node, target))
            if not draws:
                return None
            code_draws += draws
        elif is_random(node) or type(target).__name__ == "KeyedDraw":
            return None
        elif isinstance(target, PackedRecurrent) and node.args[1] is not None:  # its salt
            return None  # the user's code draws for the packed rows, the graph for the padded ones
    return code_draws


def _draws_of(node: fx.Node, function: Callable[..., Any]) -> Iterator[_Draw]:
    """Yield the draws that one keyed operator stands for; none where they cannot be replaced."""
    name = str(node.meta["op"]).removeprefix("aten.").partition(".")[0].rstrip("_")
    arguments: Any = node.args
    _, salt, batch_dim, *args = arguments
    if name in _MASKED:
        at: dict[Any, Any] = {**dict(enumerate(args)), **node.kwargs}
        p = at.get("dropout_p", at.get(4)) if name == "scaled_dot_product_attention" else at.get("p", at.get(_P_AT))
        along = batch_dim if name not in _BY_CHANNEL or batch_dim in (0, 1) else None
        yield _Draw("bernoulli", _mask_filler(salt, p, along))
    elif name in _RECURRENT:
        for layer in range(int(args[_LAYERS_AT]) - 1):
            # Inside, torch has time before the samples; the plan's numbers are those of the layout outside.
            yield _Draw(
                "bernoulli", _mask_filler(salt + layer, args[_RECURRENT_P_AT], batch_dim, args[_BATCH_FIRST_AT])
            )
    elif name != "rrelu":

        def fill(part: SampleSlice, *inputs: Any, **options: Any) -> Tensor:
            value: Tensor = function(part, salt, batch_dim, *inputs, **options)
            return value

        yield _Draw(_SAME.get(name, name), fill)


def _mask_filler(salt: int, p: Any, batch_dim: int | None, swaps: bool = False) -> Callable[..., Tensor]:
    def fill(part: SampleSlice, noise: Tensor, keeps: float = 0.5, **_: Any) -> Tensor:
        dropped = p if isinstance(p, float) else 1.0 - keeps
        like = noise.transpose(0, 1) if swaps else noise
        mask = keep_mask(part, salt, dropped, like.shape, batch_dim, noise.device)
        return (mask.transpose(0, 1) if swaps else mask).to(noise.dtype)

    return fill


class KeyedDraws(TorchDispatchMode):
    """Mode in which the user's code draws the plan's numbers for a sample slice.

    Args:
        draws: what the code draws, in order.
        part: the sample slice whose numbers are drawn.

    Raises:
        DrawsDiffer: the code draws other numbers, in another order, or in its backward pass; or it did not draw all.
    """

    def __init__(self, draws: list[_Draw], part: SampleSlice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._draws, self._part, self._done = draws, part, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _draws_now(func) or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        operator = func._schema.name.removeprefix("aten::")
        name = operator.rstrip("_")
        if self._done == len(self._draws) or self._draws[self._done].operator != name:
            raise DrawsDiffer(
                f"draw {self._done + 1} of the model's random numbers is {operator}, as it was not when it was captured"
            )
        value = self._draws[self._done].fill(self._part, *args, **kwargs)
        self._done += 1
        if not operator.endswith("_"):
            return value
        written: Tensor = args[0]
        return written.copy_(value)

    def check_all_drawn(self) -> None:
        """Refuse code that has drawn fewer numbers than its graph."""
        if self._done != len(self._draws):
            raise DrawsDiffer(
                f"the model drew random numbers {self._done} times, and {len(self._draws)} times when it was captured"
            )


def _draws_now(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags or func._schema.name == "aten::multinomial"
