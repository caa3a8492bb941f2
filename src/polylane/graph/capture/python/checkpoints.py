"""The user's own calls of torch.utils.checkpoint: captured as plain calls, and found again by the operators' frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch.utils.checkpoint
from torch import fx

# Numbers of the calls in the export that is running, by the id of their frame.
_CALLS: dict[int, int] = {}
_FILE = str(torch.utils.checkpoint.__file__)
_REGION = re.compile(r'File "<checkpoint (?P<number>\d+)>"')


@contextmanager
def checkpoints_inlined() -> Iterator[None]:
    """Context manager: run the function that torch.utils.checkpoint is given directly, and number the calls."""
    module: Any = torch.utils.checkpoint
    _CALLS.clear()

    def note() -> None:
        # Of checkpoint() itself, two frames up. Ids of frames are reused: a later call overwrites an earlier one's.
        _CALLS[id(sys._getframe(2))] = max(_CALLS.values(), default=0) + 1

    class Inlined:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            note()
            # The reentrant kind has gradients only where one of its inputs has.
            tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
            with nullcontext() if any(arg.requires_grad for arg in tensors) else torch.no_grad():
                return function(*args)

    def begin(function: Any, args: Any, kwargs: Any, *, context_fn: Callable[[], Any], **_: Any) -> Iterator[None]:
        note()
        return within(context_fn()[0])

    def begin_2_13(function: Any, keep: bool, contexts: Callable[[], Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        note()
        return within(contexts()[0])

    def within(context: AbstractContextManager[Any]) -> Iterator[None]:
        with context:
            yield

    with (
        patch.object(module, "CheckpointFunction", Inlined),
        # torch 2.13 has and calls the second alone; later ones call the first.
        patch.object(module, "_checkpoint_without_reentrant_generator_impl", begin, create=True),
        patch.object(module, "_checkpoint_without_reentrant_generator", begin_2_13),
    ):
        yield


def name_checkpoint(frame: FrameType) -> str:
    """Return what stands for a frame in the stack traces of operators if it is a call's, or ""."""
    number = _CALLS.get(id(frame)) if frame.f_code.co_filename == _FILE else None
    return "" if number is None else f"<checkpoint {number}>"


def is_checkpointed(node: fx.Node) -> bool:
    """Return whether an operator of the export runs inside of a call."""
    return node.op == "call_function" and _REGION.search(node.meta.get("stack_trace") or "") is not None


def find_checkpoints(graph: fx.Graph) -> tuple[frozenset[str], ...]:
    """Return the names of the nodes inside of each call, in the order of the calls; nested ones count as the outer."""
    regions: dict[int, set[str]] = {}
    for node in graph.nodes:
        outermost = _REGION.search(node.meta.get("stack_trace") or "")
        if node.op == "call_function" and outermost is not None:
            regions.setdefault(int(outermost["number"]), set()).add(str(node.meta["name"]))
    return tuple(frozenset(names) for _, names in sorted(regions.items()))
