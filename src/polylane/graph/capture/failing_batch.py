"""Failing batches: what a batch on which a loss fails shows about the data, told beside the error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.batch import batch_structure, clone_leaves, sampled_leaves
from polylane.graph.capture.export import ModelWithLoss, model_restored


def describe_failing_batch(model_with_loss: ModelWithLoss, leaves: Sequence[Any]) -> str:
    """Return what is likely wrong with the data, as the end of a sentence; "" if nothing shows it.

    Data that give batches where samples are asked for make batches of batches: each row of these is one on which the
    loss works. And data that are a tensor give batches that are one.

    Args:
        model_with_loss: model and loss, unchanged afterwards.
        leaves: flat leaves of the batch on which the loss failed.
    """
    if batch_structure(model_with_loss.rebuild(leaves)) is None:
        shape = list(leaves[0].shape)
        return f"; the batch is one tensor of shape {shape}: data that give inputs and labels give pairs of them"
    split = sampled_leaves(leaves)
    rows = [leaf[0] if is_split else leaf for leaf, is_split in zip(clone_leaves(leaves), split, strict=True)]
    inner = [row for row, is_split in zip(rows, split, strict=True) if is_split]
    if len({row.shape[0] if row.dim() else 0 for row in inner}) != 1 or not inner[0].dim():
        return ""
    try:
        with model_restored(model_with_loss), torch.enable_grad():
            result = model_with_loss.given_loss(model_with_loss.model, model_with_loss.rebuild(rows))
    except Exception:  # neither does one row work: the data are not what is wrong, as far as this shows
        return ""
    if isinstance(result, Tensor) and result.dim():
        return ""
    shapes = ", ".join(str(list(row.shape)) for row in inner)
    return (
        f"; it works on the first sample by itself (tensors of shape {shapes}): data must give single samples, which "
        "are put together to batches, and these seem to be batches already"
    )
