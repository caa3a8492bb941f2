"""Operation: demand of one operator, forward and backward, from its local shapes; one rule per ATen operator."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polylane.cost.operators import bandwidth_bound as moved
from polylane.cost.operators import matmul_like as products
from polylane.cost.operators.demand import Kind, LocalCall, Operation, PassDemand, Product, Shape
from polylane.placement.strategy import OperatorCall

__all__ = ["Kind", "Operation", "PassDemand", "Product", "Shape", "operation"]


def operation(
    call: OperatorCall, inputs: Sequence[Shape], outputs: Sequence[Shape], item: int | None = None
) -> Operation:
    """Return the demand of an operator; operators without a rule count the bytes that they read and write.

    Args:
        call: the unsharded call: operator, arguments and dtypes.
        inputs, outputs: local shapes on the rank, in the call's order.
        item: upper limit of the bytes per floating-point element, where passes run in a lower precision.
    """
    local = LocalCall(call, inputs, outputs, item)
    # In-place operators (trailing "_") demand what their functional version does.
    rule = _RULES.get(call.base.removesuffix("_") if call.written_inputs else call.base)
    demand = rule(local) if rule is not None else None
    return moved.read_and_write(local) if demand is None else demand


_RULES: dict[str, Callable[[LocalCall], Operation | None]] = {
    "linear": products.linear,
    **dict.fromkeys(("matmul", "linalg_matmul", "vdot"), products.matmul("self", "other")),
    "mm": products.matmul("self", "mat2"),
    "bmm": products.matmul("self", "mat2"),
    "mv": products.matmul("self", "vec"),
    "addmm": products.matmul("mat1", "mat2", "self"),
    "baddbmm": products.matmul("batch1", "batch2", "self"),
    "einsum": products.einsum,
    "bilinear": products.bilinear,
    **dict.fromkeys(("tensordot", "inner"), products.contraction),
    "dot": products.matmul("self", "tensor"),
    **dict.fromkeys(
        ("conv1d", "conv2d", "conv3d", "convolution", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        products.convolution,
    ),
    "scaled_dot_product_attention": products.attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), products.recurrent),
    **dict.fromkeys(("add", "sub", "rsub"), moved.linear_combination),
    **dict.fromkeys(("dropout", "feature_dropout", "native_dropout"), moved.dropout),
    **dict.fromkeys(("softmax", "log_softmax", "sigmoid", "tanh", "relu", "exp", "sqrt", "rsqrt"), moved.saves_output),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
        moved.normalization,
    ),
    "cross_entropy_loss": moved.class_loss,
    "embedding": moved.embedding,
    **dict.fromkeys(
        (
            *(
                "view",
                "reshape",
                "permute",
                "transpose",
                "t",
                "flatten",
                "unflatten",
                "squeeze",
                "unsqueeze",
                "numpy_T",
            ),
            *("movedim", "moveaxis", "view_as", "_unsafe_view", "detach", "alias", "swapaxes", "adjoint", "mT"),
            *("size", "sym_size", "lift_fresh_copy", "_assert_tensor_metadata", "getitem", "real", "imag"),
        ),
        moved.view,
    ),
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "tensor_split"), moved.split),
    **dict.fromkeys(("slice", "select", "narrow", "diagonal", "unfold"), moved.slice_view),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), moved.expand_view),
    **dict.fromkeys(
        ("zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "fill"), moved.fill_tensor
    ),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "scalar_tensor"), moved.view),
    **dict.fromkeys(
        ("clone", "contiguous", "to", "_to_copy", "type_as", "copy", "cat", "stack", "roll"), moved.copy_tensor
    ),
}
