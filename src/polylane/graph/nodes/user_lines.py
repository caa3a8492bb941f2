"""User lines: where in the user's code a capture failed, and why, as parts of a sentence."""

from __future__ import annotations

import traceback

from torch import nn

from polylane.errors import read_text
from polylane.graph.python_state.own_objects import innermost_line


class NotCaptured(Exception):
    """Export failed: in which module, at which of the user's lines, and why.

    Attributes:
        path: path of the innermost module whose forward was running; None when none was.
        line: "file:line" of the user's code, or "".
        reason: the cause, as one sentence.
        data_decides: whether export stopped at a question about numbers that it does not have.
    """

    def __init__(self, path: str | None, line: str, reason: str, data_decides: bool = False) -> None:
        super().__init__(path, line, reason)
        self.path, self.line, self.reason, self.data_decides = path, line, reason, data_decides

    @classmethod
    def of(cls, model: nn.Module, error: BaseException) -> NotCaptured:
        """Return where ``error`` arose: the innermost module, and the user's innermost line, in its traceback."""
        paths = {id(module): path for path, module in model.named_modules()}
        path, lines = None, list[tuple[str, int]]()
        for frame, number in traceback.walk_tb(error.__traceback__):
            names = frame.f_code.co_varnames[:1]  # the first argument, "self" or any other name
            module = frame.f_locals.get(names[0]) if names else None
            if frame.f_code.co_name == "forward" and id(module) in paths:
                path = paths[id(module)]
            lines.append((frame.f_code.co_filename, number))
        return cls(path, innermost_line(lines), reason_of(error), _asks_for_data(error))


def _asks_for_data(error: BaseException) -> bool:
    """Return whether export failed because a branch or a size goes by the numbers of a tensor."""
    return type(error).__name__ in ("GuardOnDataDependentSymNode", "UserError") and "data-dependent" in read_text(error)


def reason_of(error: BaseException) -> str:
    """Return why something failed, on one line; what export says is put in words for the user."""
    if isinstance(error, NoGradientCall):
        return str(error)
    if "fake tensor in the exported program constant's list" in read_text(error):
        return "export cannot follow a tensor that is made inside (by .data or torch.func, say)"
    if _asks_for_data(error):
        return "which way it goes, or how much it computes, depends on the data"
    name = type(error).__name__
    text = read_text(error).strip().splitlines() or [""]
    return f"{name}: {text[0]}" if text[0] else name


def format_line(line: str) -> str:
    """Return a source line as the end of a sentence."""
    return f" ({line})" if line else ""


class NoGradientCall(Exception):
    """A call of torch.autograd.grad that cannot be written into a graph; says why."""
