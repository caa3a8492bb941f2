"""Sharding rules of pointwise operators: every dimension, and partial sums where the operator is linear."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.placement import PARTIAL, Shard, join_cuts, slice_cuts
from polylane.placement.rules.by_dimension import broadcast_input_labels, label_dimensions, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Strategy, TensorValue

# Pointwise operators that torch does not tag as such.
_UNTAGGED = (
    *("absolute", "arccos", "arccosh", "arcsin", "arcsinh", "arctan", "arctan2", "arctanh", "complex", "divide"),
    *("fill", "fix", "floor_divide", "greater", "greater_equal", "hardswish", "imag", "isclose", "isreal", "less"),
    *("less_equal", "log_sigmoid", "masked_fill", "multiply", "negative", "not_equal", "polar", "real", "rsub"),
    *("subtract", "special_digamma", "special_erf", "special_erfc", "special_erfinv", "special_exp2", "special_expit"),
    *("special_expm1", "special_gammainc", "special_gammaincc", "special_gammaln", "special_i0", "special_log1p"),
    *("special_logit", "special_multigammaln", "special_ndtr", "special_polygamma", "special_psi", "special_round"),
    *("special_sinc", "special_xlogy", "true_divide", "where", "zero", "_prelu_kernel", "__and__", "__or__", "__xor__"),
    *("__lshift__", "__rshift__"),
)
# The value itself: in other memory, of another dtype, or without its gradient.
_COPIES = (
    *("alias", "alias_copy", "clone", "contiguous", "copy", "detach", "detach_copy", "lift", "lift_fresh"),
    *("lift_fresh_copy", "resolve_conj", "resolve_neg", "to", "type_as", "_conj", "_to_copy"),
    *("_cast_Byte", "_cast_Char", "_cast_Double", "_cast_Float", "_cast_Half", "_cast_Int", "_cast_Long"),
    *("_cast_Short", "conj"),
)

# Arguments in which an operator is linear: each tuple may be partial sums together, with everything else whole.
_LINEAR: dict[str, tuple[tuple[str, ...], ...]] = {
    **dict.fromkeys(_COPIES, (("self",),)),
    "copy": (("src",),),
    **dict.fromkeys(("neg", "negative", "positive", "deg2rad", "rad2deg"), (("self",),)),
    **dict.fromkeys(("add", "sub", "subtract", "rsub"), (("self", "other"),)),
    **dict.fromkeys(("mul", "multiply"), (("self",), ("other",))),
    **dict.fromkeys(("div", "divide", "true_divide"), (("self",),)),
    "where": (("self", "other"),),
    "masked_fill": (("self", "value"),),
    "lerp": (("self", "end"),),
    "addcmul": (("self", "tensor1"), ("self", "tensor2")),
    "addcdiv": (("self", "tensor1"),),
    # A backward pass is linear in the gradient that comes in.
    **dict.fromkeys(
        ("tanh_backward", "sigmoid_backward", "silu_backward", "gelu_backward", "threshold_backward"),
        (("grad_output",),),
    ),
}


@rule("pointwise", *_UNTAGGED, *_COPIES)
def pointwise(call: OperatorCall) -> Iterator[Strategy]:
    """Shards of each dimension of the output, and of every input that has it and does not broadcast along it."""
    if call.written_inputs or not call.outputs or call.op == "aten.where.default":  # where(condition) is nonzero()
        return
    dim_labels = label_dimensions(call.outputs[0])
    yield from strategies_by_dimension(
        call, broadcast_input_labels(call, dim_labels), [dim_labels for _ in call.outputs]
    )
    yield from _on_partial_sums(call)


def _on_partial_sums(call: OperatorCall) -> Iterator[Strategy]:
    if not call.outputs[0].dtype.is_floating_point or call.arguments.get("rounding_mode") is not None:
        return
    for names in _LINEAR.get(call.base, ()):
        values = [call.arguments.get(name) for name in names]
        tensors = [value for value in values if isinstance(value, TensorValue)]
        # A number would be added once per rank: only zero may be.
        is_linear = all(isinstance(value, TensorValue) or (value == 0 and value is not False) for value in values)
        if tensors and is_linear and all(tensor.dtype.is_floating_point for tensor in tensors):
            yield call.strategy("summands", {tensor.index: PARTIAL for tensor in tensors}, PARTIAL)


@rule("prelu")
def prelu(call: OperatorCall) -> Iterator[Strategy]:
    """x (N, C, ...), with a slope for every channel, or one for all."""
    dim_labels = label_dimensions(call.outputs[0])
    slopes = [dim_labels[1] if call["weight"].shape != (1,) and len(dim_labels) > 1 else None] * call["weight"].dim
    yield from strategies_by_dimension(call, [dim_labels, slopes], [dim_labels])


@rule("glu")
def glu(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; the halved one if both halves are cut alike."""
    x, out = call["self"], call.outputs[0]
    dim_labels = label_dimensions(out)
    halved = call["dim"] % max(x.dim, 1)
    name, dim_labels[halved] = dim_labels[halved], None
    yield from strategies_by_dimension(call, [dim_labels], [dim_labels])
    if name is None:
        return
    # Each rank needs the same positions of both halves: two segments, cut alike.
    half = out.shape[halved]
    halves = [(slice_cuts(cuts, 0, half), slice_cuts(cuts, half, 2 * half)) for cuts in call.common_cuts(x.at(halved))]
    for cuts in dict.fromkeys([*call.common_cuts(out.at(halved)), *(a for a, b in halves if a == b)]):
        shard = Shard(halved, join_cuts([cuts, cuts]))
        yield call.strategy(f"dim {name}", {x.index: shard}, Shard(halved, cuts))
