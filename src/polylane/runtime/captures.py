"""Captures of one objective in one mode: under which settings of the user's each was made, and which holds now."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from polylane.errors import PolylaneError
from polylane.graph.effects import Effects
from polylane.graph.partition import Partition
from polylane.graph.settings import Settings
from polylane.runtime.own_python import leaf_paths
from polylane.runtime.prepare import Prepared, named_parameters, optimized

KEPT = 8  # settings that are remembered at once, those that were used last
OFTEN = 4  # captures anew, from which on the user is told


@dataclass
class _Known:
    """Settings, their number, and what was seen of the runs that were captured with them."""

    number: int
    settings: Settings
    effects: Effects


class Captures:
    """The settings that an objective was captured with, by number; 0 are those at the start.

    Args:
        prepared: the training.
        name: of the objective.
        training: the mode.
        ahead: what was captured before there were workers.
    """

    def __init__(self, prepared: Prepared, name: str, training: bool, ahead: Partition | None) -> None:
        self._prepared, self._name, self._training = prepared, name, training
        self._losses = [objective.loss for objective in prepared.objectives.values()]
        self._leaves = {path for each in prepared.partitions.values() for path in leaf_paths(each.graph)}
        self._known: list[_Known] = []
        self._first = None if ahead is None else self._add(0, ahead)
        self._next = len(self._known)

    def number(self) -> tuple[int, int]:
        """The number of the settings as they are now, and that of those that make room for them; -1: of none.

        Raises:
            PolylaneError: what was changed cannot be captured anew.
        """
        for i, known in enumerate(self._known):
            if known.settings.change() is None:
                if i:
                    self._known.insert(0, self._known.pop(i))
                return known.number, -1
        if self._known:
            self._see_that_it_can_be(self._known[0].settings)
        forgotten = self._known.pop().number if len(self._known) == KEPT else -1
        return self._next, forgotten

    def add(self, number: int, partition: Partition) -> None:
        """What was captured with the settings as they are now."""
        self._add(number, partition)
        self._next = max(self._next, number + 1)

    def _add(self, number: int, partition: Partition) -> Settings:
        effects = partition.graph.code.effects or Effects()
        known = next((each for each in self._known if each.number == number), None)
        if known is not None:  # for a batch of another form, which may have run other functions
            effects = replace(
                effects.with_those_of(known.effects),
                ran=effects.ran | known.effects.ran,
                environment=(*known.effects.environment, *effects.environment),
            )
            self._known.remove(known)
        settings = Settings(self._prepared.model, self._losses, effects, self._leaves, self._training)
        self._known.insert(0, _Known(number, settings, effects))
        return settings

    def _see_that_it_can_be(self, last: Settings) -> None:
        change = last.change()
        if self._next == OFTEN:
            warnings.warn(
                f"{change} is another one again: for each of its values the model is captured anew, which takes time; "
                "read from a registered buffer it would be part of the one that is there",
                stacklevel=6,
            )
        if not self._training or self._first is None:
            return
        graph, plan = self._prepared.partitions[self._name].graph, self._prepared.plan
        objective = self._prepared.objectives[self._name]
        named = named_parameters(self._prepared.model, self._losses)
        for name in self._first.regraded():
            info = graph.parameters.get(name)
            parameter = dict(named).get(name)
            if info is None or parameter is None:
                continue
            if parameter.requires_grad and not info.trainable and name in optimized(named, objective.optimizer):
                raise PolylaneError(
                    f"{name} requires a gradient now, but did not when the training was prepared, so that the "
                    "optimizer was made without it: let it require one then, and freeze it before the first step"
                )
            if not parameter.requires_grad and info.trainable and (plan.sync.shard != "none" or plan.sync.serves):
                words = ",".join(plan.sync.words())
                raise PolylaneError(
                    f"{words}: {name} was frozen between steps, but what replicas hold parts of is trained together: "
                    "freeze it before the training is prepared"
                )
