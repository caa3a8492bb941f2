"""What torch.export refuses of ordinary models, or does slowly: repaired for as long as an export runs."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls
from torch.utils._python_dispatch import _disable_current_modes

from polylane.graph.capture.python.checkpoints import name_checkpoint
from polylane.graph.python_state.own_objects import is_users

# Filled in by torch's own decorators, which no type checker sees.
_FAKES: Any = fake_impls


@contextmanager
def exports_repaired() -> Iterator[None]:
    """Context manager: inside, export takes the CTC loss, and modules that cast themselves to what they are."""
    ctc = {torch.ops.aten._ctc_loss.Tensor: _fake_ctc_loss}
    with patch.dict(_FAKES.op_implementations_dict, ctc), patch.object(nn.Module, "_apply", _apply_where_it_changes):
        yield


def without_absent_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keyword arguments without ``generator=None``, with which torch takes no symbolic sizes."""
    if kwargs.get("generator", 0) is not None:
        return kwargs
    return {name: value for name, value in kwargs.items() if name != "generator"}


def _fake_ctc_loss(mode: Any, function: Any, scores: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """Return a loss for each sample, and its table, which ends at the longest target: here of one place."""
    with mode:
        return scores.new_empty(scores.shape[1]), scores.new_empty(scores.shape[1], scores.shape[0], 1)


_APPLY: Any = nn.Module._apply


def _apply_where_it_changes(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``nn.Module._apply``, but a cast that leaves every tensor as it is does not put new ones in their places."""
    modules = self.modules() if recurse else [self]
    present = {t for m in modules for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    with _disable_current_modes(), torch.no_grad():
        likes = [torch.empty(0, dtype=dtype, device=device) for dtype, device in {(t.dtype, t.device) for t in present}]
        unchanged = all(fn(like) is like for like in likes)
    return self if unchanged else _APPLY(self, fn, recurse)


class UsersFrames:
    """Stands in for torch's record of the whole stack, which takes longer than to trace an operator."""

    def __init__(self, outermost: str) -> None:
        """Record no frame above those of a file, for they belong to polylane's caller, not to the loss."""
        self._outermost = outermost

    def extract(self) -> UsersFrames:
        """Return what stands in for a record of the present stack."""
        return self

    def summary(self) -> traceback.StackSummary:
        """Return the present stack's frames that are the user's, the innermost last."""
        frame: FrameType | None = sys._getframe(1)
        frames = list[traceback.FrameSummary]()
        while frame is not None and (file := frame.f_code.co_filename) != self._outermost:
            if is_users(file):
                frames.append(traceback.FrameSummary(file, frame.f_lineno, frame.f_code.co_name, lookup_line=False))
            elif label := name_checkpoint(frame):
                frames.append(traceback.FrameSummary(label, 1, "checkpoint", lookup_line=False))
            frame = frame.f_back
        return traceback.StackSummary.from_list(frames[::-1])
