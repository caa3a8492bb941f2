"""Stale weights: refuses a call of the user's model in a process where its weights are not those of the training.

A worker keeps up to date what its stage holds, and under some plans only a shard of that. Nothing in the model shows
it: its forward would compute with the initial weights of other stages, with shards, or with one replica's weights. Such
a call is refused until whole weights are loaded into the model.

    weights of a module                  stale                            until
    trained by other stages              from the first step on           they are written
    sharded over ranks                   always                           the parameters are replaced
    of one replica (local SGD, servers)  while replicas differ            they are written after close

The refusal is one global forward pre-hook, which looks the module up in a table. It is not in the modules themselves:
captures, copies and pickles of a model do not have it.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.runtime.parameters.local_model import LocalModel


class StaleWeights(PolylaneError):
    """A call of the user's model in a process where its weights are not those of the training."""


class StaleTensors:
    """Which weights of a model are not up to date in this process; made once the process holds its part.

    Args:
        model: the user's model, held by a weak reference.
        elsewhere: by the model's own names, parameters that only other workers train, with the reason.
        parts: by name, parameters of which this worker holds a shard only, with the reason.
        trained: names of all trained parameters, for replicas that differ for some steps.
        apart: reason why replicas differ for some steps; "" where they never do.
    """

    def __init__(
        self,
        model: nn.Module,
        elsewhere: Mapping[str, str],
        parts: Mapping[str, str],
        trained: Collection[str] = (),
        apart: str = "",
    ) -> None:
        self._model = weakref.ref(model)
        self._elsewhere, self._parts, self._why_apart = dict(elsewhere), dict(parts), apart
        self._trained = frozenset(trained)
        self._steps, self._replicas_differ, self._is_closed = 0, False, False
        named = _named_parameters(model)
        self._object_ids = {name: id(named[name]) for name in parts}
        self._version_marks = _version_marks(named, elsewhere)
        self._first_elsewhere = next(((name, weakref.ref(named[name])) for name in elsewhere), None)
        _unwatch_modules(model)
        if concerned := {*elsewhere, *parts, *(trained if apart else ())}:
            _watch_modules(self, model, concerned)

    def record_step(self, apart: bool = False) -> None:
        """Record that an optimizer step was taken.

        Args:
            apart: whether the replicas' weights differ after this step.
        """
        self._steps += 1
        self._replicas_differ = apart
        name, reference = self._first_elsewhere or ("", None)
        first, model = None if reference is None else reference(), self._model()
        if first is not None and model is not None and _version_mark(first) != self._version_marks[name]:
            # The user has loaded whole weights since the last step. They are outdated by this step: mark them again.
            # One parameter stands for all, so that a step costs nothing.
            self._version_marks |= _version_marks(_named_parameters(model), self._elsewhere)

    def close(self) -> None:
        """End the training: weights that are written into the model from now on do not become stale again."""
        self._is_closed, model = True, self._model()
        if self._replicas_differ and model is not None:
            self._version_marks |= _version_marks(_named_parameters(model), self._trained)

    def why_stale(self, path: str) -> str:
        """Return why the weights of the module at a path are not those of the training; "" where they are."""
        if (model := self._model()) is None:
            return ""
        named = {n: p for n, p in _named_parameters(model).items() if not path or n.startswith(f"{path}.")}
        # In the order of the table above: shards, other stages' weights, weights of one replica.
        for name in named:
            if name in self._parts and self._object_ids[name] == id(named[name]):
                return self._parts[name]
            if name in self._elsewhere and self._steps and self._version_marks[name] == _version_mark(named[name]):
                return self._elsewhere[name]
            if (
                name in self._trained
                and self._replicas_differ
                and not (self._is_closed and self._version_marks[name] != _version_mark(named[name]))
            ):
                return self._why_apart
        return ""


def track_stale_weights(holding: LocalModel) -> StaleTensors:
    """Track the weights that are not up to date on a worker that trains."""
    prepared, plan, rank = holding.prepared, holding.prepared.plan, holding.world.rank
    graphs = [partition.graph for partition in prepared.partitions.values()]
    trained = {name for graph in graphs for name, info in graph.parameters.items() if info.trainable}
    named, elsewhere, parts = _named_parameters(prepared.model), dict[str, str](), dict[str, str]()
    for name in named:
        own = next((graph.tied[name] for graph in graphs if name in graph.tied), name)
        stages = holding.owning_stages.get(own, ())
        if holding.shard_spec.is_sharded(own):
            axes = ",".join(f"{axis}={plan.degree(axis)}" for axis in plan.axes)
            parts[name] = f"under {axes} this worker (rank {rank}) holds a part of {name}"
        elif holding.shards.keeps_only_shards and own in holding.shards.buffer_of:
            parts[name] = f"under shard=parameters this worker (rank {rank}) holds a part of {name}"
        elif own in trained and stages and holding.stage not in stages:
            elsewhere[name] = (
                f"{name} is trained by stage {min(stages)}, and this worker (rank {rank}) is of stage {holding.stage}"
            )
    aliases = {name for graph in graphs for name, own in graph.tied.items() if own in trained}
    words = ",".join(plan.sync.to_words())
    apart = f"under {words} each replica has weights of its own until it next agrees with the others"
    return StaleTensors(
        prepared.model,
        elsewhere,
        parts,
        (trained | aliases) & named.keys(),
        apart if plan.sync.is_replica_local else "",
    )


def track_server_weights(prepared: CompiledTraining, rank: int) -> StaleTensors:
    """Track stale weights on a worker that only serves parameters: none of the model's own are ever up to date."""
    why = f"this worker (rank {rank}) only serves parameters, and trains no model"
    return StaleTensors(prepared.model, dict.fromkeys(_named_parameters(prepared.model), why), {})


def _named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters(remove_duplicate=False))


def _version_marks(named: Mapping[str, nn.Parameter], names: Collection[str]) -> dict[str, tuple[int, int, int]]:
    return {name: _version_mark(named[name]) for name in names}


def _version_mark(tensor: Tensor) -> tuple[int, int, int]:
    """Return a mark that changes when a tensor is written in place, replaced, or given other storage."""
    return id(tensor), tensor._version, tensor.data_ptr()


# The hook ------------------------------------------------------------------------------------------------------------

# Modules with stale weights inside, with their path in the model. The hook is registered as long as there are any.
_TABLE: weakref.WeakKeyDictionary[nn.Module, tuple[StaleTensors, str]] = weakref.WeakKeyDictionary()
_HOOK: list[RemovableHandle] = []
_OWN = [0]


@contextmanager
def allow_own_calls() -> Iterator[None]:
    """Context manager for the runtime's own calls of the user's modules, which are never refused; it may be nested."""
    _OWN[0] += 1
    try:
        yield
    finally:
        _OWN[0] -= 1


def _watch_modules(stale: StaleTensors, model: nn.Module, names: set[str]) -> None:
    # A module is watched if it has such a weight, or a submodule of it has: all prefixes of the names.
    paths = {""}
    for name in names:
        while name:
            name = name.rpartition(".")[0]
            paths.add(name)
    for path, module in model.named_modules():
        if path in paths:
            _TABLE[module] = stale, path
    if not _HOOK:
        _HOOK.append(register_module_forward_pre_hook(_refuse_stale_call))


def _unwatch_modules(model: nn.Module) -> None:
    for module in model.modules():
        _TABLE.pop(module, None)
    if not _TABLE and _HOOK:
        _HOOK.pop().remove()


def _refuse_stale_call(module: nn.Module, _: Any) -> None:
    if _OWN[0] or (found := _TABLE.get(module)) is None:
        return
    stale, path = found
    if why := stale.why_stale(path):
        raise StaleWeights(
            f"{f'model.{path}' if path else 'model'}(...) would compute with weights that are not those of the "
            f"training: {why}; call job.evaluate(batch) for a loss, or load job.state_dict(), the whole weights, into "
            "a newly built model"
        )
