"""Operation: what one operator asks of a device, forward and backward, from the shapes that a rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polylane.cost import demand_bytes as moved
from polylane.cost import demand_products as products
from polylane.cost.demand import Kind, Local, Operation, Pass, Product, Shape
from polylane.placement.call import Call

__all__ = ["Kind", "Operation", "Pass", "Product", "Shape", "operation"]


def operation(call: Call, inputs: Sequence[Shape], outputs: Sequence[Shape], item: int | None = None) -> Operation:
    """What an operator asks of a device; what is not known by name, by the bytes that it reads and writes.

    Args:
        call: the operator.
        inputs, outputs: shapes of what the rank has of its tensors, in the call's order.
        item: bytes of an element of a floating-point value, where passes run in another precision than the call's.
    """
    local = Local(call, inputs, outputs, item)
    rule = _RULES.get(call.base.removesuffix("_") if call.written else call.base)
    found = rule(local) if rule is not None else None
    return moved.memory(local) if found is None else found


_RULES: dict[str, Callable[[Local], Operation | None]] = {
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
    **dict.fromkeys(("softmax", "log_softmax", "sigmoid", "tanh", "relu", "exp", "sqrt", "rsqrt"), moved.output_kept),
    **dict.fromkeys(
        ("layer_norm", "native_layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm"),
        moved.normalization,
    ),
    "cross_entropy_loss": moved.loss,
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
    **dict.fromkeys(("split", "split_with_sizes", "chunk", "unbind", "unsafe_split", "tensor_split"), moved.parts),
    **dict.fromkeys(("slice", "select", "narrow", "diagonal", "unfold"), moved.piece),
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), moved.expanded),
    **dict.fromkeys(("zeros", "ones", "full", "arange", "zeros_like", "ones_like", "full_like", "fill"), moved.made),
    **dict.fromkeys(("empty", "empty_like", "new_empty", "scalar_tensor"), moved.view),
    **dict.fromkeys(("clone", "contiguous", "to", "_to_copy", "type_as", "copy", "cat", "stack", "roll"), moved.copied),
}
