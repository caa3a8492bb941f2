"""Model state: the parameters and buffers that one worker holds, as regions of the model's own tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import HeldTensor, Region, whole_region
from polylane.runtime.state.optimizer_state import OptimizedPart

PREFIX = "model/"


def parameter_region(local_model: LocalModel, name: str, tensor: Tensor) -> Region:
    """Return the part of a parameter or buffer that a worker computes with.

    Args:
        local_model: the worker's parameters and buffers.
        name: canonical name of the parameter or buffer.
        tensor: its tensor in this worker's model.
    """
    if name not in local_model.shard_spec.shapes:  # in no graph: nothing has cut it
        return whole_region(tensor.shape)
    return Region(tuple(local_model.shard_spec.shapes[name]), local_model.shard_spec.index_box(name))


def optimized_parts(local_model: LocalModel, parameters: Mapping[str, nn.Parameter]) -> dict[str, OptimizedPart]:
    """Return what an optimizer of this worker steps on, by canonical name, with its regions.

    Args:
        local_model: the worker's parameters and buffers.
        parameters: what the optimizer steps on: parameters, or ZeRO shards of them.
    """
    parts = {}
    for name, parameter in parameters.items():
        region = Region(tuple(local_model.shard_spec.shapes[name]), local_model.shard_spec.index_box(name))
        parts[name] = OptimizedPart(parameter, _cut_by_zero(local_model, name, region))
    return parts


def _cut_by_zero(local_model: LocalModel, name: str, region: Region) -> Region:
    flat = local_model.shards.buffer_of.get(name)
    part = flat and flat.optimizer_parts[name]
    # A parameter that an optimizer updates as a whole keeps its own shape.
    if not part or part.parameter.shape == region.local_shape:
        return region
    return Region(region.shape, region.box, (part.begin, part.end))


def model_tensors(local_model: LocalModel) -> Iterator[HeldTensor]:
    """Yield this worker's parameters and buffers, or ZeRO shards of them, by their global names.

    What no stage trains or writes is among them: it is part of the model, whoever reads it.
    """
    parameters, buffers = local_model.tensors.parameters(), local_model.tensors.buffers()
    local = local_model.local_names()
    elsewhere = {*local_model.owning_stages, *local_model.stages_of_buffers()} - local
    for name, tensor in {**parameters, **buffers}.items():
        if name in elsewhere:
            continue
        region, part = parameter_region(local_model, name, tensor), local_model.shards.local_tensor(name, tensor)
        if part is not None:
            # Under ZeRO 3 the parameter's own tensor is a placeholder, and the shard is a range of its elements.
            hidden = local_model.shards.keeps_only_shards and name in local_model.shards.buffer_of
            yield HeldTensor(
                PREFIX + name, _cut_by_zero(local_model, name, region) if hidden else region, part.detach()
            )


def speaks_for(local_model: LocalModel, name: str) -> bool:
    """Return whether this worker's stage is the one that saves a parameter or buffer.

    Of stages with the same tensor it is the lowest that has the current value; what is in no stage, rank 0 saves.
    """
    if name in local_model.owning_stages:
        return local_model.stage == min(local_model.owning_stages[name])
    if (users := local_model.stages_of_buffers().get(name)) is not None:
        return local_model.stage == local_model.buffers.owning_stage(name, users)
    return local_model.world.rank == 0


def state_dict_names(local_model: LocalModel) -> dict[str, str]:
    """Return, by the names of the model's ``state_dict``, the global names of the tensors that hold their values."""
    # One entry per name, although several names may be one tensor: a loaded model must find all of them.
    tied = dict[str, str]()
    for partition in local_model.prepared.partitions.values():
        tied |= partition.graph.tied
    model = local_model.tensors.model
    known_names = {*local_model.tensors.parameters(), *local_model.tensors.buffers()}
    # Weights that are shared without being tied in a graph are known by identity.
    first_names = {id(tensor): name for name, tensor in reversed(list(model.named_parameters(remove_duplicate=False)))}
    shared = {name: first_names[id(t)] for name, t in model.named_parameters(remove_duplicate=False)}
    names = {name: tied.get(name, shared.get(name, name)) for name in model.state_dict(keep_vars=True)}
    known = {name: PREFIX + global_name for name, global_name in names.items() if global_name in known_names}
    return {name_weight(model, name): global_name for name, global_name in known.items()}


def name_weight(model: nn.Module, name: str) -> str:
    """Return the name of a weight in the user's model, which may be one of several that are trained as one."""
    rename = getattr(model, "name_weight", None)
    return name if rename is None else str(rename(name))
