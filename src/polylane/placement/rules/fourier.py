"""Sharding rules of Fourier transforms: along all dimensions that are not transformed, and, being linear, of sums."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.rules.by_dimension import label_dimensions, partial_sums, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Strategy

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")  # of real and Hermitian values, forth and back
_TRANSFORMS = tuple(f"fft_{kind}{dims}" for kind in _KINDS for dims in ("", "2", "n"))


@rule(*_TRANSFORMS, "fft_fftshift", "fft_ifftshift")
def transform(call: OperatorCall) -> Iterator[Strategy]:
    """One or several dimensions are transformed, each needing all its elements; lengths of others stay."""
    x = call["self"]
    dim_labels = label_dimensions(x, _transformed_dims(call))
    yield from strategies_by_dimension(call, [dim_labels], [dim_labels])
    yield from partial_sums(call, x)


def _transformed_dims(call: OperatorCall) -> list[int]:
    """Return the dimensions that a transform needs whole."""
    x, dims = call["self"], call["dim"]
    if dims is None:  # all, or as many of the last ones as lengths are given
        lengths = call.arguments.get("s")
        return list(range(x.dim - len(lengths) if lengths is not None else 0, x.dim))
    return [dim % max(x.dim, 1) for dim in ([dims] if isinstance(dims, int) else dims)]


@rule("stft")
def short_time(call: OperatorCall) -> Iterator[Strategy]:
    """Spectra of windows of a signal: signals, where there are several, are independent of each other."""
    x, out = call["self"], call.outputs[0]
    if x.dim == 2:
        other_labels = [[None] * value.dim for value in call.inputs if value is not x]
        yield from strategies_by_dimension(call, [["b", None], *other_labels], [["b", *[None] * (out.dim - 1)]])
    yield from partial_sums(call, x)
