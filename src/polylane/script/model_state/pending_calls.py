"""Pending calls: calls of models that were recorded and not run, whose state the script may meet in the meantime.

the script                                    before that
reads what a pending call writes              the call is run
writes what a pending call reads              its loss is run; without one the call cannot be run any more
runs another call of the model                earlier calls that write are run, in their order
drops the results of a call that writes       it is run before the next one
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.script.recorded_calls import LiveCalls, RecordedCall, Result

MOST_REFERENCES = 256  # to calls, before those that were run are sorted out


class PendingCalls:
    """The calls of a loop's models that were not run so far.

    Args:
        live: the calls of which the script holds results.
        run_loss: runs the tape of a loss.
        run_forward: runs the tape of results without a backward pass.
    """

    def __init__(
        self,
        live: LiveCalls,
        run_loss: Callable[[Result], Any],
        run_forward: Callable[[Sequence[Result]], Any],
    ) -> None:
        self._live, self._run_loss, self._run_forward = live, run_loss, run_forward
        # Those that write are held: they are run even if the script drops their results.
        self._writing, self._others = list[RecordedCall](), list[weakref.ref[RecordedCall]]()

    def add(self, call: RecordedCall) -> None:
        """Add a model's call, the youngest."""
        if not call.touched.is_written:
            if len(self._others) > MOST_REFERENCES:
                self._others = [
                    ref for ref in self._others if (kept_call := ref()) is not None and not kept_call.has_run
                ]
            self._others.append(weakref.ref(call))
            return
        for earlier in self._list_writing({call.model}):
            if not self._live.is_needed(earlier):
                self.settle(earlier)
        self._writing = [earlier for earlier in self._writing if not earlier.has_run]
        self._writing.append(call)

    def _list_writing(self, models: Collection[int]) -> list[RecordedCall]:
        return [call for call in self._writing if not call.has_run and call.model in models]

    def _list_all(self, model: int) -> Iterator[RecordedCall]:
        reading = (call for ref in self._others if (call := ref()) is not None)
        return (call for call in (*self._writing, *reading) if call.model == model and not call.has_run)

    def settle(self, call: RecordedCall) -> None:
        """Run a call now, with the loss that depends on it, if the script has one."""
        while not call.has_run:
            if (loss := self._live.find_loss(call)) is not None:
                self._run_loss(loss)
            else:
                self._run_forward([Result(call, i) for i, x in enumerate(call.results) if isinstance(x, Tensor)])

    def settle_models(self, models: Collection[int]) -> None:
        """Run the calls of models that write."""
        for call in self._list_writing(models):
            self.settle(call)

    def begin_read(self, model: int, name: str) -> None:
        """Run the calls that write a buffer, which the script is about to read."""
        for call in self._list_writing({model}):
            if name in call.touched.written_buffers:
                self.settle(call)

    def begin_read_python(self, model: int, path: str = "", name: str = "") -> None:
        """Run the calls that change a model's Python state, which the script is about to read.

        Args:
            model: number of the model.
            path: of a module in it.
            name: of the module's attribute; "": anything may be read.
        """
        for call in self._list_writing({model}):
            if (path, name) in call.touched.python or (call.touched.python and not name):
                self.settle(call)

    def begin_write(self, model: int, name: str = "") -> None:
        """Run the losses of calls that read what the script is about to write.

        Args:
            model: number of the model.
            name: of a buffer in it; "": any call may read it.
        """
        for call in list(self._list_all(model)):
            if name and name not in call.touched.read_buffers | call.touched.written_buffers:
                continue
            if self._live.find_loss(call) is not None or not self._live.is_needed(call):
                self.settle(call)
            else:
                call.is_outdated = True

    def run_earlier(self, calls: Sequence[RecordedCall]) -> bool:
        """Run what comes before some calls of the same models, and writes; return whether there was any.

        Raises:
            PolylaneError: one of the calls writes, too, and comes before that.
        """
        numbers = {call.number for call in calls}
        youngest = {call.model: call.number for call in calls if call.target is not None and not call.is_parameter}
        earlier = [
            call
            for call in self._list_writing(youngest)
            if call.number not in numbers and call.number < youngest[call.model]
        ]
        for call in earlier:
            older_calls = (
                c for c in calls if c.target is not None and c.model == call.model and c.number < call.number
            )
            if older_call := next((c for c in older_calls if c.touched.is_written and not c.has_run), None):
                raise PolylaneError(
                    f"{call.line}: the model is called here after {older_call.line} and before {calls[-1].line}, "
                    "which are of one loss, and each call moves its statistics or other state: call backward() in the "
                    "order of the model's calls"
                )
            self.settle(call)
        return bool(earlier)
