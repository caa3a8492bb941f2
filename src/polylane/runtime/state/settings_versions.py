"""Settings versions: which values of the user's settings a graph was captured with, and whether they are those of now.

A setting is what a capture took for a constant: an attribute of a module, a global, a flag, a variable of the
environment, a file. Each combination of values that was met has a number, which is part of the compile cache's key.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.graph.capture.output_request import OutputRequest
from polylane.graph.partition import Partition
from polylane.graph.python_state.captured_settings import CapturedSettings
from polylane.graph.python_state.side_effects import SideEffects

SETTINGS_KEPT = 8  # versions of the settings kept at once, for each purpose
MANY_SETTINGS = 4  # captures with other settings after which the user is warned

Agree = Callable[[str | None, str | None], str | None]


@dataclass(frozen=True)
class Purpose:
    """What a graph computes.

    Attributes:
        objective: name of the loss.
        training: whether in training mode; else in evaluation mode, forward only.
        request: what is asked for beside the loss; None: an evaluation's metrics, if the objective has any.
    """

    objective: str
    training: bool
    request: OutputRequest | None = None


@dataclass
class _Version:
    """One version of the settings.

    Attributes:
        number: version number, part of the cache key.
        settings: values of the user's settings at the time of the capture, to be compared with those of now.
        effects: side effects of all captures with these settings; they say which settings the code read.
    """

    number: int
    settings: CapturedSettings
    effects: SideEffects


class SettingsVersions:
    """The versions of the user's settings that graphs of one purpose were captured with; 0 is that at the start.

    Args:
        training: the training as it was compiled ahead of the workers.
        purpose: what the graphs compute.
        ahead: the partition that was captured before the workers were started; None where there is none.
    """

    def __init__(self, training: CompiledTraining, purpose: Purpose, ahead: Partition | None) -> None:
        self._training, self._purpose = training, purpose
        request = purpose.request or (None if purpose.training else training.objectives[purpose.objective].outputs)
        self._losses = [*training.losses, *([] if request is None else [request.function])]
        self._known: list[_Version] = []  # most recently used first
        self._next = 0
        self._first = None if ahead is None else self.add(0, ahead)

    def current(self, forget: Callable[[Purpose, int], None], agree: Agree) -> int:
        """Return the version number of the settings as they are now; a new number for values not seen before.

        Args:
            forget: called with the purpose and the number of a version that is evicted.
            agree: returns which file all workers take to have changed, see
                :class:`polylane.runtime.compile_cache.CompileCache`.

        Raises:
            PolylaneError: they have changed on some workers alone, or the plan cannot follow the change (a parameter
                frozen or unfrozen between steps).
        """
        # The common case, in every step: the version used last is still that of now, and is found first.
        if self._known:
            latest = self._known[0].settings
            change = latest.find_change()
            # One worker's look at files counts for all: another one may look behind the moment of a change.
            changed_file = agree(change, (latest.find_changed_file() or "") if latest.files else None)
            if change is None and not changed_file:
                return self._known[0].number
            for i, version in enumerate(self._known[1:], 1):
                has_same_files = version.settings.files == ({} if changed_file else latest.files)
                if has_same_files and version.settings.find_change() is None:
                    self._known.insert(0, self._known.pop(i))
                    return version.number
            self._see_that_it_can_be(change or changed_file)
        if len(self._known) == SETTINGS_KEPT:
            forget(self._purpose, self._known.pop().number)
        return self._next

    def add(self, number: int, partition: Partition) -> CapturedSettings:
        """Record the settings as they are now, with which a graph was captured, under a version number."""
        effects = partition.graph.code.effects or SideEffects()
        version = next((candidate for candidate in self._known if candidate.number == number), None)
        if version is not None:  # captured again for a batch of another form, which may have run other functions
            effects = replace(
                effects.merged_with(version.effects),
                functions_run=effects.functions_run | version.effects.functions_run,
                environment_keys=(*version.effects.environment_keys, *effects.environment_keys),
                files=(*version.effects.files, *effects.files),
            )
            self._known.remove(version)
        # Of this objective alone: another one's leaf reads anew what this graph has frozen.
        leaves = {node.module for node in partition.graph.nodes if node.op == "leaf"}
        settings = CapturedSettings(self._training.model, self._losses, effects, leaves, self._purpose.training)
        self._known.insert(0, _Version(number, settings, effects))
        self._next = max(self._next, number + 1)
        return settings

    def _see_that_it_can_be(self, change: str | None) -> None:
        if self._next == MANY_SETTINGS:
            warnings.warn(
                f"{change} is another one again: for each of its values the model is captured anew, which takes time; "
                "read from a registered buffer it would be part of the one that is there",
                stacklevel=5,
            )
        if not self._purpose.training or self._first is None:
            return
        # requires_grad is a setting like any other, for the optimizer holds what is frozen too. But servers have only
        # the weights that were trained at the start, and an asynchronous pipeline keeps versions of these.
        plan, held_names = self._training.plan, self._training.held[self._purpose.objective]
        changed = [name for name in self._first.changed_requires_grad() if name in held_names]
        if changed and (plan.is_asynchronous or plan.sync.has_servers):
            word = f"schedule={plan.schedule}" if plan.is_asynchronous else f"servers={plan.sync.server_count}"
            raise PolylaneError(
                f"{word}: {changed[0]} was frozen, or unfrozen, between steps, and what is trained is fixed there from "
                "the first step on: freeze it before the training is prepared, or leave this out of the plan"
            )
