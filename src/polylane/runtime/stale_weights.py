"""Stale weights: refuses a call of the user's model in a process where its weights are not those of the training.

A worker keeps up to date what its stage holds, and under some plans only a shard of that. Nothing in the model shows
it: its forward would compute with the initial weights of other stages, with shards, or with one replica's weights. Such
a call is refused until whole weights are loaded into the model.

    weights of a module                  stale                            until
    trained by other stages              from the first step on           they are written
    sharded over ranks                   always                           the parameters are replaced
    of one replica (local SGD, servers)  while replicas differ            they are written after close

The refusal is one global forward pre-hook, which looks the module up in a table. It is not in the modules themselves:
captures of a model do not have it. The weights themselves are guarded while the user's script runs, see
:mod:`polylane.runtime.guarded_tensors`; the runtime's own calls (:func:`allow_own_calls`) find ordinary ones.

All this is global, and outlives a job: it refers to models, tensors and what a worker holds of them weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import TensorWeakRef

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.graph import Graph
from polylane.graph.python_state.side_effects import modules_of_losses
from polylane.runtime.guarded_tensors import Guard, GuardedParameter, GuardedTensor, StaleWeights, remove_guard
from polylane.runtime.parameters.local_model import LocalModel


class Guards(Protocol):
    """Tensors that are guarded while the user's script runs."""

    def guard(self) -> None:
        """Guard the tensors."""

    def unguard(self) -> None:
        """Make all tensors ordinary ones again."""


class StaleTensors:
    """Which weights of a model are not up to date in this process; made once the process holds its part.

    Args:
        model: the user's model, held by a weak reference.
        elsewhere: by the model's own names, tensors that only other workers train, with the reason.
        parts: by name, tensors of which this worker holds a shard only, with the reason.
        trained: names of all trained parameters, for replicas that differ for some steps.
        reason: reason why replicas differ for some steps; "" where they never do.
        guards: by name, guards of tensors that are not whole for some time, or that a server has.
        losses: the user's losses; the tensors of those that are modules are known by names that begin with "loss.".
    """

    def __init__(
        self,
        model: nn.Module,
        elsewhere: Mapping[str, str],
        parts: Mapping[str, str],
        trained: Collection[str] = (),
        reason: str = "",
        guards: Mapping[str, Guard] | None = None,
        losses: Sequence[Any] = (),
    ) -> None:
        self._model = weakref.ref(model)
        self._elsewhere, self._parts, self._why_apart = dict(elsewhere), dict(parts), reason
        self._trained = frozenset(trained)
        self.prefix = "model."  # of the paths of modules, as the user writes them
        self.advice = (
            "call job.evaluate(batch) for a loss, use the model inside of `with job.whole_model():`, or load "
            "job.state_dict(), the whole weights, into a newly built model"
        )
        self._steps, self._replicas_differ, self._is_closed = 0, False, False
        named = _named_tensors(model, losses)
        self._object_ids = {name: id(tensor) for name, tensor in named.items()}
        # Tensors of other stages, or of one replica, to which the script has given whole values since the last step.
        self._given = set[int]()
        # Where the guarded tensors are, to find them in every step without a walk through the model.
        tables = {
            f"{path}.{key}" if path else key: (weakref.ref(module), table, key)
            for path, module in (*model.named_modules(remove_duplicate=False), *modules_of_losses(losses))
            for table in ("_parameters", "_buffers")
            for key in getattr(module, table)
        }
        self._places = [
            (name, *tables[name], replace(guard, record_write=partial(self._record_write, name)))
            for name, guard in (guards or {}).items()
        ]
        self._worded = dict[tuple[str, str], Guard]()
        self._guarded: list[TensorWeakRef] = []
        if (old_tracker := _TRACKED.get(model)) is not None:
            old_tracker.unguard()
        _TRACKED[model] = self
        _unwatch_modules(model)
        if concerned := {*elsewhere, *parts, *(trained if reason else ())}:
            _watch_modules(self, model, concerned)
        if not _OWN[0]:
            self.guard()

    def record_step(self, replicas_differ: bool = False) -> None:
        """Record that an optimizer step was taken.

        Args:
            replicas_differ: whether the replicas' weights differ after this step.
        """
        self._steps += 1
        self._replicas_differ = replicas_differ
        self._given.clear()

    def let_script_read(self) -> None:
        """Guard nothing: a prepared script's parameters have guards of their own, which read what is elsewhere."""
        self.unguard()
        self._places.clear()
        self.prefix = ""
        self.advice = (
            "call it of the prepared model (model.layer(x)), or of a copy of that with all weights "
            "(copy.deepcopy(model)), or compute it in the model's forward"
        )

    def release(self) -> None:
        """Refuse nothing any more: the model has whole weights for good."""
        self.unguard()
        self._places.clear()
        if (model := self._model()) is not None:
            _unwatch_modules(model)

    def close(self) -> None:
        """End the training: weights that are written into the model from now on do not become stale again."""
        self._is_closed = True

    def why_stale(self, path: str) -> str:
        """Return why the weights of the module at a path are not those of the training; "" where they are."""
        if (model := self._model()) is None:
            return ""
        named = {n: t for n, t in _named_tensors(model).items() if not path or n.startswith(f"{path}.")}
        return next((why for name, tensor in named.items() if (why := self._why(name, tensor))), "")

    def _why(self, name: str, tensor: Tensor) -> str:
        if self._object_ids.get(name) != id(tensor):  # the script has put another one there
            return ""
        # In the order of the table above: shards, other stages' weights, weights of one replica.
        if name in self._parts:
            return self._parts[name]
        if name in self._elsewhere and self._steps and id(tensor) not in self._given:
            return self._elsewhere[name]
        is_given = self._is_closed and id(tensor) in self._given
        return self._why_apart if name in self._trained and self._replicas_differ and not is_given else ""

    def _record_write(self, name: str, is_whole: bool) -> None:
        if not is_whole:
            return
        self._given.add(self._object_ids[name])
        for reference in self._guarded:
            tensor = reference()
            if id(tensor) == self._object_ids[name] and not self._why(name, tensor):
                remove_guard(tensor)

    def record_whole(self) -> None:
        """Record that all tensors of the model which are whole here have been given the training's values."""
        self._given |= {self._object_ids[name] for name in self._elsewhere}

    def guard(self) -> None:
        """Guard the tensors that are not whole now, until :meth:`unguard`."""
        # Written out, as unguard() is: this is done in every step.
        for name, module, table, key, guard in self._places:
            tensor: Any = getattr(module(), table, {}).get(key)
            if tensor is None or not (why := self._why(name, tensor) or guard.is_served * guard.why):
                continue
            if (name, why) not in self._worded:
                self._worded[name, why] = replace(guard, why=why, is_served=guard.is_served and why == guard.why)
            tensor._polylane_guard = self._worded[name, why]
            tensor.__class__ = GuardedParameter if isinstance(tensor, nn.Parameter) else GuardedTensor
            self._guarded.append(TensorWeakRef(tensor))

    def unguard(self) -> None:
        """Make all tensors ordinary ones again."""
        for reference in self._guarded:
            tensor = reference()
            if (guard := getattr(tensor, "_polylane_guard", None)) is not None and guard.draft is not None:
                guard.finish_draft(tensor)
            kind = type(tensor)
            if kind is GuardedParameter or kind is GuardedTensor:
                tensor.__class__ = nn.Parameter if kind is GuardedParameter else Tensor
                del tensor._polylane_guard
        self._guarded.clear()


def track_stale_weights(local_model: LocalModel) -> StaleTensors:
    """Track the weights that are not up to date on a worker that trains."""
    prepared, plan, rank = local_model.prepared, local_model.prepared.plan, local_model.world.rank
    graphs = [partition.graph for partition in prepared.partitions.values()]
    trained = {name for graph in graphs for name, info in graph.parameters.items() if info.trainable}
    buffers = local_model.stages_of_buffers()
    named, elsewhere, parts = _named_tensors(prepared.model, prepared.losses), dict[str, str](), dict[str, str]()
    for name, tensor in named.items():
        first_name = next((graph.tied[name] for graph in graphs if name in graph.tied), name)
        stages = (
            local_model.owning_stages.get(first_name, ())
            if isinstance(tensor, nn.Parameter)
            else buffers.get(first_name, ())
        )
        if local_model.shard_spec.is_sharded(first_name):
            axes = ",".join(f"{axis}={plan.degree(axis)}" for axis in plan.axes)
            parts[name] = f"under {axes} this worker (rank {rank}) holds a part of {name}"
        elif local_model.shards.keeps_only_shards and first_name in local_model.shards.buffer_of:
            parts[name] = f"under shard=parameters this worker (rank {rank}) holds a part of {name}"
        elif (first_name in trained or first_name in buffers) and stages and local_model.stage not in stages:
            verb = "trained" if first_name in trained else "written"
            elsewhere[name] = (
                f"{name} is {verb} by stage {min(stages)}, and this worker (rank {rank}) is of stage "
                f"{local_model.stage}"
            )
    aliases = {name for graph in graphs for name, shared_name in graph.tied.items() if shared_name in trained}
    words = ",".join(plan.sync.to_words())
    reason = f"under {words} each replica has weights of its own until it next agrees with the others"
    reason = reason if plan.sync.is_replica_local else ""
    concerned = {*parts, *elsewhere}
    if reason or plan.sync.has_servers:
        concerned |= (trained | aliases) & named.keys()
    of_model = _named_tensors(prepared.model).keys()
    labels = {name: f"model.{name}" if name in of_model else name for name in concerned}
    guards = {n: _guard_for(local_model, n, labels[n], named[n], graphs, n in parts) for n in concerned}
    trained = (trained | aliases) & named.keys()
    return StaleTensors(prepared.model, elsewhere, parts, trained, reason, guards, prepared.losses)


def _guard_for(
    local_model: LocalModel, name: str, label: str, tensor: Tensor, graphs: Sequence[Graph], is_part: bool
) -> Guard:
    """Return the guard of a parameter or buffer, by any of its names; ``label`` is what a script calls it."""
    first_name = next((graph.tied[name] for graph in graphs if name in graph.tied), name)
    spec, sync = local_model.shard_spec, local_model.prepared.plan.sync
    shape = torch.Size(spec.shapes.get(first_name, tensor.shape))
    why = f"under {','.join(sync.to_words())} a server has it" if sync.has_servers else ""
    guard = Guard(label, why, shape, is_served=sync.has_servers)
    return replace(guard, **_part_of(local_model, guard.name, first_name, tensor)) if is_part else guard


def _part_of(local_model: LocalModel, label: str, first_name: str, tensor: Tensor) -> dict[str, Any]:
    """Return how a guard gets at the part of a tensor that a worker holds, as long as there is one."""
    to_holding, to_tensor = weakref.ref(local_model), TensorWeakRef(tensor)

    def get_holding() -> LocalModel:
        if (local_model := to_holding()) is None:
            raise StaleWeights(
                f"{label} cannot be written: this process has a part of it, of a training that has ended; "
                "model.load_state_dict(state, assign=True) replaces it by a whole one"
            )
        return local_model

    def find_local() -> Tensor | None:
        shards, value = get_holding().shards, to_tensor()
        return None if value is None else shards.local_tensor(first_name, value)

    return {"local": find_local, "cut": lambda full_tensor: get_holding().local_part(first_name, full_tensor)}


def track_server_weights(prepared: CompiledTraining, rank: int) -> StaleTensors:
    """Track stale weights on a worker that only serves parameters: none of the model's own are ever up to date."""
    why = f"this worker (rank {rank}) only serves parameters, and trains no model"
    named = _named_tensors(prepared.model, prepared.losses)
    named = {name: tensor for name, tensor in named.items() if isinstance(tensor, nn.Parameter)}
    # Served, and readable, only until the first step: from then on the reason above stands, which :meth:`guard` puts.
    served = f"under {','.join(prepared.plan.sync.to_words())} a server has it"
    of_model = _named_tensors(prepared.model).keys()
    guards = {
        name: Guard(f"model.{name}" if name in of_model else name, served, parameter.shape, is_served=True)
        for name, parameter in named.items()
    }
    return StaleTensors(prepared.model, dict.fromkeys(named, why), {}, guards=guards, losses=prepared.losses)


def _named_tensors(model: nn.Module, losses: Sequence[Any] = ()) -> dict[str, Tensor]:
    """Return all parameters and buffers of a model, and of losses that are modules, by every name of theirs."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    for path, module in modules_of_losses(losses):
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        named |= {f"{path}.{key}": tensor for key, tensor in tensors}
    return named


# The hook ------------------------------------------------------------------------------------------------------------

# Modules with stale weights inside, with their path in the model. The hook is registered as long as there are any.
_TABLE: weakref.WeakKeyDictionary[nn.Module, tuple[StaleTensors, str]] = weakref.WeakKeyDictionary()
_HOOK: list[RemovableHandle] = []
_TRACKED: weakref.WeakKeyDictionary[nn.Module, Guards] = weakref.WeakKeyDictionary()  # the last of each model
_OWN = [0]


def track_guards(owner: nn.Module, guards: Guards) -> None:
    """Have tensors guarded while the user's script runs, as long as ``owner`` lives."""
    _TRACKED[owner] = guards
    if not _OWN[0]:
        guards.guard()


@contextmanager
def allow_own_calls() -> Iterator[None]:
    """Context manager for what the runtime does with the user's model, which is never refused; it may be nested."""
    _OWN[0] += 1
    if _OWN[0] == 1:
        for stale in list(_TRACKED.values()):
            stale.unguard()
    try:
        yield
    finally:
        _OWN[0] -= 1
        if not _OWN[0]:
            for stale in list(_TRACKED.values()):
                stale.guard()


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
    if _OWN[0] or (entry := _TABLE.get(module)) is None:
        return
    stale, path = entry
    if why := stale.why_stale(path):
        raise StaleWeights(
            f"{stale.prefix + path if path else 'model'}(...) would compute with weights that are not those of the "
            f"training: {why}; {stale.advice}"
        )
