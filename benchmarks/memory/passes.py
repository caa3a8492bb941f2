"""What the passes of a worker hold: bytes of tensors alive after every pass, and the most inside of one.

Activations are all that passes make and that came in messages, without gradients of parameters, and without gradients
of values once their pass is over, which only wait to be sent. Weights, their versions, the batch and the optimizer's
state do not count. A storage counts once, however many tensors view it.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from polylane.cost.memory.allocation_meter import AllocationMeter, storage_id
from polylane.runtime.pipeline.executor import Executor
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.schedule.action import Action, ActionKind

_KINDS = {
    "forward": ActionKind.FORWARD,
    "backward": ActionKind.BACKWARD,
    "backward_input": ActionKind.BACKWARD_INPUT,
    "backward_weight": ActionKind.BACKWARD_WEIGHT,
}


@dataclass(frozen=True)
class PassMemory:
    """Bytes of activations of a worker at one pass.

    Attributes:
        kind, stage: which pass.
        before, after: bytes that are alive when it begins and when it is over, between passes.
        most: most bytes alive while it runs.
    """

    kind: ActionKind
    stage: int
    before: int
    after: int
    most: int


class PassMeter:
    """Counts what the passes of this thread hold, while it is patched into the runners by :func:`watch_passes`.

    Attributes:
        passes: what was measured, pass by pass.
        stage: stage of the action that is running.
    """

    def __init__(self) -> None:
        self.passes: list[PassMemory] = []
        self.stage = 0
        self._meter = AllocationMeter()
        self._sent = dict[int, weakref.ref[Any]]()

    def run(self, kind: ActionKind, runner: StageRunner, original: Callable[..., Any], *given: Any) -> Any:
        """Run one pass by its original method, and measure it."""
        leaves = [leaf for leaf in given[2] if isinstance(leaf, Tensor)] if kind is ActionKind.FORWARD else []
        fixed = [leaf for leaf in runner.tensors.values() if isinstance(leaf, Tensor)]
        self._meter.ignore_tensors([*fixed, *leaves])
        # What came in messages is part of what is held from here on; gradients that came, during this pass alone.
        for came in given[1].values() if len(given) > 1 else ():
            self._meter.add(came)
            self._sent.pop(storage_id(came), None)
        before, waiting = self._held(), self._bytes(self._sent_storages())
        self._meter.peak_bytes = self._meter.current_bytes
        with self._gradients_ignored(fixed), self._meter:
            result = original(runner, *given)
        most = self._meter.peak_bytes - waiting
        if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
            for gradient in result.values():
                self._sent[storage_id(gradient)] = weakref.ref(gradient.untyped_storage())
        del given
        self.passes.append(PassMemory(kind, self.stage, before, self._held(), most))
        return result

    def _held(self) -> int:
        return self._meter.current_bytes - self._bytes(self._sent_storages())

    @contextmanager
    def _gradients_ignored(self, fixed: Sequence[Tensor]) -> Iterator[None]:
        """Have parameters' gradients count until they are there, and no longer; each version of a weight is one.

        Hooks are on for this pass alone: those that are on a parameter when a step begins are off during its passes.
        """
        leaves = {id(leaf): leaf for leaf in fixed if leaf.requires_grad and leaf.is_leaf}
        hooks = [leaf.register_post_accumulate_grad_hook(self._ignore_gradient) for leaf in leaves.values()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _ignore_gradient(self, leaf: Tensor) -> None:
        if leaf.grad is not None:
            self._meter.ignore_tensors([leaf.grad])

    def _sent_storages(self) -> set[int]:
        """Return the storages of gradients of values that passes have handed on and that are alive still."""
        self._sent = {number: each for number, each in self._sent.items() if each() is not None}
        return set(self._sent)

    def _bytes(self, storages: Iterable[int]) -> int:
        alive = self._meter.alive_bytes()
        return sum(alive.get(number, 0) for number in storages)


@contextmanager
def watch_passes() -> Iterator[PassMeter]:
    """Have every stage of this process measured by one meter."""
    meter, originals = PassMeter(), {name: getattr(StageRunner, name) for name in _KINDS}
    gc.collect()

    def watched(name: str) -> Callable[..., Any]:
        def run(self: StageRunner, *given: Any) -> Any:
            return meter.run(_KINDS[name], self, originals[name], *given)

        return run

    run_action = Executor._run

    def run_watched(self: Executor, action: Action, *given: Any) -> None:
        meter.stage = action.stage
        run_action(self, action, *given)

    for name in _KINDS:
        setattr(StageRunner, name, watched(name))
    Executor._run = run_watched  # type: ignore[method-assign]
    try:
        yield meter
    finally:
        for name, original in originals.items():
            setattr(StageRunner, name, original)
        Executor._run = run_action  # type: ignore[method-assign]


@dataclass(frozen=True)
class OneMicrobatch:
    """What one microbatch of a stage holds.

    Attributes:
        live: bytes between its forward and its backward pass.
        waiting: bytes between the halves of a backward pass in two; 0 where it is whole.
    """

    live: int
    waiting: int = 0

    @staticmethod
    def of(passes: Sequence[PassMemory]) -> dict[int, OneMicrobatch]:
        """Return by stage what its first microbatch added to what was held, of a run of single microbatches."""
        found = dict[int, OneMicrobatch]()
        for stage in {each.stage for each in passes}:
            own = [each for each in passes if each.stage == stage]
            forward = next(each for each in own if each.kind is ActionKind.FORWARD)
            halves = [each for each in own if each.kind is ActionKind.BACKWARD_WEIGHT]
            received = forward.before - _held_before(passes, forward)
            waiting = halves[0].before - halves[0].after if halves else 0
            found[stage] = OneMicrobatch(forward.after - forward.before + received, waiting)
        return found


def _held_before(passes: Sequence[PassMemory], one: PassMemory) -> int:
    """Return what was held after the pass before, without what has come in messages since."""
    index = next(i for i, each in enumerate(passes) if each is one)
    return passes[index - 1].after if index else 0


def play_live(lane: Sequence[Action], one: Mapping[int, OneMicrobatch]) -> int:
    """Return the most bytes between the passes of a lane, if all microbatches hold what one of them does alone."""
    held = most = 0
    for action in lane:
        own = one[action.stage]
        if action.kind is ActionKind.FORWARD:
            held += own.live
        elif action.kind is ActionKind.BACKWARD:
            held -= own.live
        elif action.kind is ActionKind.BACKWARD_INPUT:
            held += own.waiting - own.live
        elif action.kind is ActionKind.BACKWARD_WEIGHT:
            held -= own.waiting
        most = max(most, held)
    return most
