"""Running statistics under the user's own torch.utils.checkpoint: torch moves them again with every recomputation.

The captured graph runs such a normalization once, moved as far as all of its runs on one device move it. With momentum
m and statistics s, k equal moves r <- (1 - m) r + m s are one move with momentum 1 - (1 - m)^k.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.nn import functional

from polylane.graph.batch import clone_leaves, take_first_samples
from polylane.graph.capture.export import ModelWithLoss, model_restored
from polylane.graph.capture.python.checkpoints import is_checkpointed
from polylane.graph.nodes.memory import written_arguments

_NORMS = ("aten.batch_norm.default", "aten.instance_norm.default")
_MEAN, _BY_BATCH, _MOMENTUM = 3, 5, 6  # arguments of both: running mean, whether statistics of the input, momentum
_FEW = 4  # samples of the counted step


def repeat_moves(graph: fx.Graph, model_with_loss: ModelWithLoss, leaves: Sequence[Any]) -> None:
    """Move the running statistics of normalizations under checkpoints as often as a step of the model itself does.

    How often that is depends on nesting, on the kind of checkpoint, and on which inputs need gradients: one step of the
    model on one device is run, and the moves are counted. Whether one longer move is the same is for the self-check to
    say: the moves of two calls of one module are in another order where each is repeated.

    Args:
        graph: captured code, unlabelled; changed in place.
        model_with_loss: model and loss that it was captured from; restored afterwards.
        leaves: flat leaves of an example batch.
    """
    norms = [node for node in graph.nodes if _moves_under_checkpoint(node)]
    if not norms or any(parameter.is_meta for parameter in model_with_loss.parameters()):  # no step runs without data
        return
    times = _count_moves(model_with_loss, leaves, {str(node.args[_MEAN].meta["role"][1]) for node in norms})
    for node in norms:
        runs = times[str(node.args[_MEAN].meta["role"][1])]
        node.update_arg(_MOMENTUM, 1 - (1 - node.args[_MOMENTUM]) ** runs if runs > 1 else node.args[_MOMENTUM])
    modules = {name.rpartition(".")[0]: runs for name, runs in times.items()}
    for node in graph.nodes:
        if str(node.target) == "aten.add_.Tensor" and is_checkpointed(node) and (name := _buffer_name(node.args[0])):
            # The normalization's count of its passes.
            node.update_arg(1, node.args[1] * modules.get(name.rpartition(".")[0], 1))


def buffers_written_again(graph: fx.Graph) -> set[str]:
    """Return the names of the buffers that operators under checkpoints write."""
    written = {_buffer_name(arg) for node in graph.nodes if is_checkpointed(node) for arg in written_arguments(node)}
    return {name for name in written if name is not None}


def _moves_under_checkpoint(node: fx.Node) -> bool:
    return (
        node.op == "call_function"
        and str(node.target) in _NORMS
        and bool(node.args[_BY_BATCH])
        and _buffer_name(node.args[_MEAN]) is not None
        and is_checkpointed(node)
    )


def _buffer_name(node: Any) -> str | None:
    role = node.meta.get("role", ("", "")) if isinstance(node, fx.Node) else ("", "")
    return str(role[1]) if role[0] == "buffer" else None


def _count_moves(model_with_loss: ModelWithLoss, leaves: Sequence[Any], means: Collection[str]) -> Mapping[str, int]:
    """Return by running mean how often a step moves it for each move of the forward pass; 1 where calls differ.

    The numbers are 1, too, where the step fails: the self-check, which runs it again, will say so.
    """
    ids = {name: id(buffer) for name, buffer in model_with_loss.named_tensors("buffers")}
    for batch in (take_first_samples(leaves, _FEW), leaves):
        with model_restored(model_with_loss), warnings.catch_warnings(), _counted_moves() as moves:
            warnings.simplefilter("ignore")
            try:
                with torch.enable_grad():
                    loss = model_with_loss(*clone_leaves(batch))[0]
                forward = moves.copy()
                loss.backward()
            except Exception:  # too few samples, say
                continue
            quotients = {name: divmod(moves[ids[name]], max(forward[ids[name]], 1)) for name in means}
            return {name: runs if not remainder and runs else 1 for name, (runs, remainder) in quotients.items()}
    return dict.fromkeys(means, 1)


@contextmanager
def _counted_moves() -> Iterator[Counter[int]]:
    """Context manager: the yielded counter has the moves of running statistics by the id of the running mean.

    By patches, not by a torch function mode: recomputations run in autograd's own threads, too.
    """
    moves = Counter[int]()

    def counting(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            mean = args[1] if len(args) > 1 else kwargs.get("running_mean")
            if mean is None:
                return function(*args, **kwargs)
            old_mean = mean.detach().clone()
            try:
                return function(*args, **kwargs)
            finally:
                # A recomputation stops inside of the last call that saves a tensor: before or after it has moved.
                moves[id(mean)] += not torch.equal(old_mean, mean)

        return counted

    with (
        patch.object(functional, "batch_norm", counting(functional.batch_norm)),
        patch.object(functional, "instance_norm", counting(functional.instance_norm)),
    ):
        yield moves
