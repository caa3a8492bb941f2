"""Python state in checkpoints: plain attributes that a forward writes (``self.steps += 1``), and modules' extra state.

Each replica calls the forward once a step, and so has a value of its own; of its stages the one that runs the call has
it. Values are restored on every worker: by another plan, another stage may run the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.errors import PolylaneError
from polylane.graph.python_state.own_objects import MISSING
from polylane.graph.python_state.state import PythonName
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.plain_values import SCALARS, from_plain, to_plain
from polylane.samples.leaf_effects import collect_effects


def collect_python_state(local_model: LocalModel, replica: int) -> dict[str, Any]:
    """Return what this worker's forward passes have written in Python, and the extra state of modules.

    Raises:
        PolylaneError: a value that changes in every step is of a type that no file has.
    """
    entries = dict[str, Any]()
    for written in _written_names(local_model.prepared):
        value = written.place.get()
        # Only the stage that runs the call has the value of the last step: on others it is that of the capture.
        if local_model.stage not in written.stages or value is MISSING:
            continue
        if _is_plain(value):
            entries[f"python/{written.key}@{replica}"] = value
        elif written.changes_every_step and not _has_extra_state(written.place.owner):
            raise PolylaneError(
                f"the forward or the loss writes {written.place.label}, a {type(value).__name__}, which no checkpoint "
                "can hold: keep it in a buffer (register_buffer), or return it from the module's get_extra_state()"
            )
    for path, module in _with_extra_state(local_model.tensors.model):
        if local_model.stage in _stages_of(local_model, path):
            state = to_plain(module.get_extra_state(), f"{path or 'the model'}.get_extra_state()")
            entries[f"extra/{path}@{replica}"] = state
    return entries


def restore_python_state(prepared: CompiledTraining, model: nn.Module, replica: int, plain: Mapping[str, Any]) -> None:
    """Set what forward passes write in Python, and the extra state of modules, to that of a checkpoint."""
    for written in _written_names(prepared):
        name = _saved_name(f"python/{written.key}", replica, plain)
        if name is not None:
            _put(written.place, plain[name])
    for path, module in _with_extra_state(model):
        name = _saved_name(f"extra/{path}", replica, plain)
        if name is not None:
            module.set_extra_state(from_plain(plain[name]))


def _saved_name(name: str, replica: int, plain: Mapping[str, Any]) -> str | None:
    """Return the name of a replica's own value; where that replica was not there, of the first one's."""
    return next((candidate for candidate in (f"{name}@{replica}", f"{name}@0") if candidate in plain), None)


@dataclass(frozen=True)
class _WrittenName:
    """A name that forward passes write in Python.

    Attributes:
        key: its name in checkpoints, the same by every plan.
        place: where it is, such as an attribute of a module.
        stages: stages that have its value, since they run the call that writes it.
        changes_every_step: whether a call writes it that runs in every step, and not the capture alone.
    """

    key: str
    place: PythonName
    stages: set[int]
    changes_every_step: bool


def _written_names(prepared: CompiledTraining) -> Iterator[_WrittenName]:
    """Yield the names that forward passes write, each once."""
    seen_keys = set[str]()
    for partition in prepared.partitions.values():
        effects, leaves = partition.graph.code.effects, collect_effects(partition.graph)
        for target in () if effects is None else effects.written_names:
            key = f"{target.kind}/{target.path or target.label}/{target.name}"
            label = target.label if target.kind != "attribute" or target.path is None else f"self.{target.name}"
            # Leaves are calls of the user's own Python in the graph: those that write it run in every step.
            words = {f"writes {label}", f"draws from {label}"}
            at = {name for name, items in leaves.items() if any(e.kind == "state" and e.what in words for e in items)}
            stages = {s for s in range(partition.stages) if any(node.name in at for node in partition.nodes(s))}
            if key not in seen_keys:
                seen_keys.add(key)
                first_chunk = prepared.plan.first_chunk
                yield _WrittenName(key, target, {first_chunk(s) for s in stages} or {0}, bool(at))
    # Lines of a loss that only note something run on every worker.
    for target in [
        target
        for objective in prepared.objectives.values()
        if objective.log is not None
        for target in objective.log.places
    ]:
        key = f"{target.kind}/{target.label}/{target.name}"
        if key not in seen_keys:
            seen_keys.add(key)
            yield _WrittenName(key, target, set(prepared.plan.first_chunks), False)


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if _has_extra_state(module):
            yield path, module


def _has_extra_state(owner: Any) -> bool:
    return isinstance(owner, nn.Module) and type(owner).get_extra_state is not nn.Module.get_extra_state


def _stages_of(local_model: LocalModel, path: str) -> set[int]:
    """Return the stage that runs a module's own code, or the first one that runs a part of it."""
    for partition in local_model.prepared.partitions.values():
        for stage in range(partition.stages):
            for node in partition.nodes(stage):
                module = node.module or ""
                if not module or not path or f"{module}.".startswith(f"{path}.") or f"{path}.".startswith(f"{module}."):
                    return {local_model.prepared.plan.first_chunk(stage)}
    return {0}


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple, set, frozenset):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(_is_plain(part) for item in value.items() for part in item)
    return type(value) in SCALARS


def _put(target: PythonName, value: Any) -> None:
    """Set a name; a container keeps its identity, since others may refer to it."""
    # The module's own list may be another object's attribute as well, which must see the restored values.
    present: Any = target.get()
    if type(present) is not type(value) or type(value) not in (list, dict, set):
        target.put(value)
        return
    present.clear()
    (present.extend if type(value) is list else present.update)(value)
