"""Optimizer attributes: what an optimizer keeps beside its state (slow weights, averages, generators), for checkpoints.

Tensors that belong to a parameter, by their key or by their place in a list, are saved as the optimizer's state of that
parameter is: cut as it, and by each worker for its own. What belongs to none is the first worker's.

    self.ema[id(parameter)]    attribute/loss/ema/layers.0.weight
    self.buffers[0]            attribute/loss/buffers/layers.0.weight    in a list of the parameters' number and shapes
    group["buffers"][0]        attribute/loss/param_groups/0/buffers/layers.0.weight
    self.base.noise            attribute/loss/base/noise                 of an optimizer inside, a generator

The path of a list or mapping has its kind and keys, so that what an optimizer makes in its first step is made again.
Numbers and texts that are attributes themselves are options (:mod:`polylane.runtime.state.optimizer_state`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor

from polylane.compile.optimizer_parts import find_tensors, own_attributes
from polylane.compile.optimizer_sequence import optimizers_in
from polylane.errors import PolylaneError
from polylane.runtime.state.held_tensors import WorkerState, whole_region
from polylane.runtime.state.optimizer_state import (
    Fill,
    OptimizedPart,
    find_variant,
    is_beside_state,
    join_state,
    split_state,
)
from polylane.runtime.state.plain_values import SCALARS, from_plain, to_plain

_SEQUENCES = (list, tuple, deque)
_SEQUENCES_BY_NAME: dict[str, Any] = {kind.__name__: kind for kind in _SEQUENCES}
_EACH = "*"  # ends the path of a list or mapping whose entries belong to parameters, and are named by these
_MISSING: Any = object()

Parts = Mapping[str, OptimizedPart]


class _Owners:
    """Finds the parameter that a value belongs to which an optimizer keeps.

    Args:
        optimizer: an optimizer on this worker.
        names: names of all parameters, by id.
        parts: what this worker steps on, by the parameter's canonical name.

    Attributes:
        groups: names of the parameters that the optimizer steps on, by group.
        order: those of all groups.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, names: Mapping[int, str], parts: Parts) -> None:
        self.names, self.parts = names, parts
        named = [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups]
        self.groups = [[name for name in group if name in parts] for group in named]
        self.order = [name for group in self.groups for name in group]

    def of_key(self, key: Any) -> tuple[str, str]:
        """Return the parameter that a key of a mapping stands for, and how it does; "" for none."""
        if isinstance(key, str):
            return (key, "name") if key in self.parts else ("", "")
        name = self.names.get(key if isinstance(key, int) else id(key), "")
        return name, "" if not name else "id" if isinstance(key, int) else "parameter"

    def of_values(self, values: Sequence[Any], group: int | None) -> list[str]:
        """Return the parameters to which values in a list belong, by their number and shapes; empty for none.

        Args:
            values: tensors, None for a parameter without one, or mappings that have tensors.
            group: number of the group of which it is; None: of all, or of any one.
        """
        if group is not None:
            return self._align(values, self.groups[group])
        matches = [names for group_names in self.groups if (names := self._align(values, group_names))]
        return self._align(values, self.order) or (matches[0] if len(matches) == 1 else [])

    def _align(self, values: Sequence[Any], names: list[str]) -> list[str]:
        # Some optimizers list only what they have updated: the parameters with a gradient.
        moved = [name for name in names if self.parts[name].parameter.grad is not None]
        matches = (
            candidate
            for candidate in (names, moved)
            if len(candidate) == len(values) and all(map(self._is_alike, values, candidate))
        )
        return next(matches, [])

    def _is_alike(self, value: Any, name: str) -> bool:
        values = value.values() if isinstance(value, Mapping) else (value,)
        shape = self.parts[name].parameter.shape
        return value is None or any(isinstance(item, Tensor) and item.shape == shape for item in values)


# ---- collected -------------------------------------------------------------------------------------------------------


def collect_attributes(
    objective: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parts: Parts,
    speaks_for: Callable[[str], bool],
    is_whole: bool,
    variant: str = "",
) -> WorkerState:
    """Return what an optimizer keeps in attributes of its own, and in lists and mappings of tensors in its groups.

    Args:
        objective: name of the objective that the optimizer is of.
        optimizer: the user's optimizer on this worker.
        names: names of all parameters, by id.
        parts: what it steps on, by the parameter's canonical name.
        speaks_for: whether this worker saves what belongs to a parameter, by its name; "" for what belongs to none.
        is_whole: whether it steps on all parameters of the objective, each of them whole.
        variant: ending of names for state that is one replica's own.

    Raises:
        PolylaneError: no file can hold a value; or workers have parts of the parameters, and it cannot be seen which
            of them it belongs to.
    """
    state = WorkerState()
    for prefix, member in _places(objective, optimizer):
        known_ids = {id(member.state), id(member.param_groups), id(member.defaults)}
        collector = _Collector(state, prefix, variant, _Owners(member, names, parts), speaks_for, is_whole, known_ids)
        for name, value in own_attributes(member):
            collector.add(value, name)
        for index, group in enumerate(member.param_groups):
            for key, value in group.items():
                if is_beside_state(key, value):
                    collector.add(value, f"param_groups/{index}/{key}", group=index)
        collector.say(_EACH, "", sorted(name for name, _ in own_attributes(member)))
    return state


def _places(objective: str, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.optim.Optimizer]]:
    """Yield the user's optimizers, with what the paths of their attributes begin with."""
    for number, member in enumerate(optimizers_in(optimizer)):
        yield f"attribute/{objective}/" + (f"{number}/" if number else ""), member


def _contents(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what is kept in an optimizer inside of another."""
    return {**dict(own_attributes(optimizer)), "state": optimizer.state, "param_groups": optimizer.param_groups}


@dataclass
class _Collector:
    """Adds what an optimizer keeps to a worker's state; see :func:`collect_attributes`."""

    found: WorkerState
    prefix: str
    variant: str
    owners: _Owners
    speaks_for: Callable[[str], bool]
    is_whole: bool
    known: set[int]  # ids of what is saved elsewhere, or has been added

    def say(self, path: str, owner: str, node: Any) -> None:
        if self.speaks_for(owner):
            self.found.plain[self.prefix + path + self.variant] = node

    def add(self, value: Any, path: str, owner: str = "", depth: int = 1, group: int | None = None) -> None:
        # A parameter in an attribute is the model's; an optimizer's own state is saved by parameter.
        if id(value) in self.known or id(value) in self.owners.names:
            return
        if isinstance(value, Tensor):
            if self.speaks_for(owner):
                self.say(path, owner, self._add_tensor(value, path, owner))
        elif isinstance(value, torch.Generator):
            self.say(path, owner, {"generator": value.get_state().tolist(), "device": str(value.device)})
        elif isinstance(value, torch.optim.Optimizer):
            self.known.add(id(value))
            for name, item in _contents(value).items():
                self.add(item, f"{path}/{name}", owner, depth + 1)
        elif isinstance(value, (Mapping, *_SEQUENCES)) and not _is_plain(value):
            self._add_values(value, path, owner, depth, group)
        elif isinstance(value, _SEQUENCES):
            node = {"plain": to_plain(list(value), path), "maxlen": getattr(value, "maxlen", None)}
            self.say(path, owner, {"kind": type(value).__name__, **node})
        elif isinstance(value, Mapping) or (depth > 1 and isinstance(value, SCALARS)):
            self.say(path, owner, {"plain": to_plain(value, path)})

    def _add_tensor(self, value: Tensor, path: str, owner: str) -> Any:
        if (part := self.owners.parts.get(owner)) is not None:
            return {"of": split_state(value, self.prefix + path, part, self.variant, self.found, path)}
        if not owner and not self.is_whole and value.dim():
            raise PolylaneError(
                f"the optimizer keeps a tensor in {path} that no checkpoint can hold under this plan: a worker has "
                "some of the parameters, and it is not to be seen to which of them the tensor belongs; keep it in "
                "self.state[parameter], or in a list that has a tensor of its shape for each parameter"
            )
        self.found.add(self.prefix + path + self.variant, whole_region(value.shape), value)
        return {"dtype": str(value.dtype), "shape": list(value.shape), "device": str(value.device)}

    def _add_values(self, value: Any, path: str, owner: str, depth: int, group: int | None) -> None:
        items = list(value.items() if isinstance(value, Mapping) else enumerate(value))
        if all(id(item) in self.owners.names for _, item in items):  # parameters, not what is kept for them
            return
        node, is_numbered = {"kind": type(value).__name__}, all(key is i for i, (key, _) in enumerate(items))
        places = self.owners.of_values([item for _, item in items], group) if is_numbered and not owner else []
        keys, by_group = list[Any](), is_numbered and group is None and len(items) == len(self.owners.groups)
        for number, (key, item) in enumerate(items):
            name, by = (places[number], "place") if places else self.owners.of_key(key) if not is_numbered else ("", "")
            if name:
                self.say(f"{path}/{_EACH}", name, {**node, "by": by})
            else:
                keys.append(key if isinstance(key, SCALARS) else {"text": str(key)})
            inner = number if by_group and not name else group
            self.add(item, f"{path}/{name or key}", name or owner, depth + 1, inner)
        self.say(path, owner, {**node, "keys": keys, "maxlen": getattr(value, "maxlen", None)})


def _is_plain(value: Any) -> bool:
    """Return whether a file can hold a value as it is, of numbers and texts in mappings and sequences."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return all(map(_is_plain, value)) if isinstance(value, _SEQUENCES) else isinstance(value, SCALARS)


# ---- restored --------------------------------------------------------------------------------------------------------


def restore_attributes(
    objective: str,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    parts: Parts,
    plain: Mapping[str, Any],
    fill: Fill,
    variant: str = "",
) -> None:
    """Give an optimizer what a checkpoint has of its attributes, in this worker's own cut; see the collecting function.

    Raises:
        PolylaneError: the optimizer has made one of these in its first steps, of a kind that cannot be made here.
    """
    for prefix, member in _places(objective, optimizer):
        paths = {path.removeprefix(prefix).partition("@")[0] for path in plain if path.startswith(prefix)}
        restorer = _Restorer(prefix, variant, _Owners(member, names, parts), plain, fill, paths, type(member).__name__)
        # Attributes that a step creates are missing in a checkpoint from before that step: they are deleted, and the
        # next step creates them again.
        for name, value in list(own_attributes(member)):
            tensors = [tensor for tensor in find_tensors(value) if id(tensor) not in names]
            if tensors and _EACH in paths and name not in restorer.read(_EACH):
                del vars(member)[name]
        restorer.fill_values(vars(member), "", {name for name in restorer.names_in("") if not name.isdecimal()})
        for index, group in enumerate(member.param_groups):
            restorer.fill_values(group, f"param_groups/{index}/", restorer.names_in(f"param_groups/{index}/"))


@dataclass
class _Restorer:
    """Gives an optimizer what a checkpoint has; see :func:`restore_attributes`."""

    prefix: str
    variant: str
    owners: _Owners
    plain: Mapping[str, Any]
    fill: Fill
    paths: Collection[str]  # of all that the checkpoint has of the optimizer, behind the prefix
    title: str  # of the optimizer, in errors

    def read(self, path: str) -> Any:
        return find_variant(self.plain, self.prefix + path, self.variant)

    def names_in(self, base_path: str) -> set[str]:
        names = {path.removeprefix(base_path).partition("/")[0] for path in self.paths if path.startswith(base_path)}
        return names - {_EACH, "param_groups" if not base_path else ""}

    def fill_values(self, values: Any, base_path: str, names: Collection[str]) -> None:
        """Put what is saved of some names into a mapping of an optimizer's attributes, or of a group's options."""
        for name in names:
            value = self.make(base_path + name, values.get(name, _MISSING), "")
            if value is _MISSING:
                raise self._refuse(base_path + name)
            values[name] = value

    def make(self, path: str, present: Any, owner: str) -> Any:
        """Return what was saved at a path: what the optimizer has there, filled, where it has that already.

        Args:
            path: of the value, behind the prefix.
            present: what the optimizer has there.
            owner: name of the parameter that it belongs to; "" where it belongs to none.
        """
        if isinstance(present, torch.optim.Optimizer):
            contents = _contents(present)
            self.fill_values(contents, f"{path}/", self.names_in(f"{path}/"))
            vars(present).update((name, value) for name, value in contents.items() if name in vars(present))
            return present
        node, header = self.read(path), self.read(f"{path}/{_EACH}")
        if header is not None or (node is not None and "keys" in node):
            return self._make_values(path, node, header, present, owner)
        if node is None or ("of" in node and owner not in self.owners.parts):
            return present
        if "generator" in node:
            generator = present if isinstance(present, torch.Generator) else torch.Generator(node["device"])
            return generator.set_state(torch.tensor(node["generator"], dtype=torch.uint8))
        if "plain" in node:
            value = from_plain(node["plain"])
            return self._make_sequence(path, node, present, value) if "kind" in node else value
        return self._make_tensor(path, node, present, owner)

    def _make_tensor(self, path: str, node: Mapping[str, Any], present: Any, owner: str) -> Tensor:
        tensor: Tensor
        if "of" in node:
            tensor = join_state(node["of"], self.owners.parts[owner], self.variant, self.fill, owner)
            if isinstance(present, Tensor) and present.shape == tensor.shape:
                present.detach().copy_(tensor)
                return present
            return tensor
        if not isinstance(present, Tensor):
            device = next((part.parameter.device for part in self.owners.parts.values()), torch.device("cpu"))
            kind = getattr(torch, node["dtype"].removeprefix("torch."))
            present = torch.empty(node["shape"], dtype=kind, device="cpu" if node["device"] == "cpu" else device)
        tensor = present
        self.fill(self.prefix + path + self.variant, whole_region(tensor.shape), tensor.detach())
        return tensor

    def _make_values(self, path: str, node: Any, header: Any, present: Any, owner: str) -> Any:
        items = present.items() if isinstance(present, Mapping) else ()
        old_entries, entries = dict(enumerate(present) if isinstance(present, _SEQUENCES) else items), dict[Any, Any]()
        named = {} if header is None else {name: self.owners.parts[name].parameter for name in self.owners.order}
        named = {name: parameter for name, parameter in named.items() if f"{path}/{name}" in self.paths}
        keys = {self.owners.of_key(key)[0]: key for key in old_entries}
        for number, (name, parameter) in enumerate(named.items()):
            key = {"place": number, "name": name, "id": id(parameter), "parameter": parameter}[header["by"]]
            key = keys.get(name, key) if header["by"] != "place" else key
            entries[key] = self.make(f"{path}/{name}", old_entries.get(key, _MISSING), name)
        texts = {str(key): key for key in old_entries if not isinstance(key, Tensor)}
        for saved in node["keys"] if node is not None else ():
            # A key that no file has must be there already.
            text, key = (saved["text"], texts.get(saved["text"])) if isinstance(saved, Mapping) else (saved, saved)
            entries[key] = self.make(f"{path}/{text}", old_entries.get(key, _MISSING), owner)
        if any(value is _MISSING for value in entries.values()):
            raise self._refuse(path)
        if isinstance(present, MutableMapping):
            present.update(entries)
            return present
        kind = (header or node)["kind"]
        return entries if kind == "dict" else self._make_sequence(path, node or header, present, list(entries.values()))

    def _make_sequence(self, path: str, node: Mapping[str, Any], present: Any, values: list[Any]) -> Any:
        if isinstance(present, (list, deque)):
            present.clear()
            present.extend(values)
            return present
        # The same object where nothing changed: the user's code may compare it by identity.
        if isinstance(present, tuple) and len(present) == len(values) and all(map(is_, present, values)):
            return present
        kind = type(present) if isinstance(present, tuple) else _SEQUENCES_BY_NAME.get(node["kind"])
        if kind is None:
            raise self._refuse(path)
        if kind is deque:
            return deque(values, node["maxlen"])
        make = getattr(kind, "_make", kind)  # a named tuple takes its values one by one
        return make(values)

    def _refuse(self, path: str) -> PolylaneError:
        return PolylaneError(f"has {path} of the {self.title}, which makes it in a step: let its constructor make it")
