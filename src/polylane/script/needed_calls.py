"""Needed calls: which of the recorded ones must run for a value that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from polylane.errors import PolylaneError
from polylane.script.recorded_calls import RecordedCall, Result, Use, is_replayable

ValueOf = Callable[[Result], Tensor]


def collect_calls(
    roots: Iterable[Result], value_of: ValueOf, written_lines: dict[str, bool], is_forward: bool = False
) -> list[RecordedCall]:
    """Return the calls that results depend on and whose values are not known, in order.

    Args:
        roots: the results that are wanted.
        value_of: returns the value of a result that was computed, or follows from what was; collective.
        written_lines: by a line of the script, whether it writes in place into what was an argument there; added to.
        is_forward: whether nothing is differentiated, so that any known value will do.

    Raises:
        RuntimeError: ``backward()`` has gone through a call before.
        PolylaneError: a call would draw other random numbers, or its argument was written in place.
    """
    needed, stack = dict[int, RecordedCall](), [root.call for root in roots]
    while stack:
        call = stack.pop()
        if call.number in needed:
            continue
        if call.is_released:
            raise RuntimeError(
                f"backward() has gone through {call.line} before: pass retain_graph=True to the first call of it"
            )
        if call.draws and call.has_run:
            raise PolylaneError(
                f"{call.line} draws random numbers (a dropout), and would draw others now that its result is used "
                "in a second step of the plan: call backward() once for the sum of the losses, and ask for values "
                "behind it"
            )
        if call.has_run and call.touched.python:
            raise PolylaneError(
                f"{call.line}: the forward keeps state in Python ({', '.join(call.touched.python.values())}), and "
                "would run a second time, as its result was asked for before the loss was there: ask for values "
                "behind backward(), or return them from the forward"
            )
        needed[call.number] = call
        for leaf in call.leaves:
            if isinstance(leaf, Result) and not _becomes_input(leaf, value_of, is_forward):
                stack.append(leaf.call)
            elif isinstance(leaf, Use) and leaf.is_written:
                written_lines[call.line] = True
                if leaf.original is not None:
                    continue
                raise PolylaneError(
                    f"a tensor of shape {tuple(leaf.tensor.shape)} was written in place after it was used "
                    f"({call.line}) and before the step was computed: write into a copy"
                )
    return [needed[number] for number in sorted(needed)]


def _becomes_input(leaf: Result, value_of: ValueOf, is_forward: bool) -> bool:
    """Return whether a result is an input of a tape: a loader's batch; or by its value, without a gradient."""
    if leaf.call.loaded is not None:
        return True
    if leaf.metadata.requires_grad and not is_forward:
        return False
    if leaf.call.is_divided:  # each worker computes it for its samples
        return leaf.position in leaf.call.values
    if leaf.position not in leaf.call.values and (leaf.position in leaf.call.runs or is_replayable(leaf.call)):
        value_of(leaf)
    return leaf.position in leaf.call.values


def find_model_results(result: Result) -> list[Result]:
    """Return the results of models' calls that a result follows from, and whose values are not known."""
    results, stack, numbers = list[Result](), [result], set[tuple[int, int]]()
    while stack:
        current = stack.pop()
        key = current.call.number, current.position
        if key in numbers or current.position in current.call.values or current.position in current.call.runs:
            continue
        numbers.add(key)
        if current.call.target is None:
            stack += current.call.arguments
        elif not current.call.is_parameter:
            results.append(current)
    return results
