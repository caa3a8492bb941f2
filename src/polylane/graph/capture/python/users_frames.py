"""The user's frames: of the stack at an operator, which export records of all of it, the part that is the user's."""

from __future__ import annotations

import sys
import traceback
from types import FrameType

from polylane.graph.capture.python.checkpoints import name_checkpoint
from polylane.graph.python_state.own_objects import is_users


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
