"""Modules that no plan can train: each is refused in a sentence that says what to give in its place."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from polylane.errors import PolylaneError, describe_message

# Classes that divide batches or parameters themselves, by name: importing FSDP takes a second.
_WRAPPERS = {
    ("torch.nn.parallel.data_parallel", "DataParallel"): "divides batches",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "divides batches",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "divides parameters",
}


def refuse_uninitialised(model: nn.Module) -> None:
    """Refuse a model with a module that lacks the tables in which torch keeps its parts: torch's functions fail on it.

    Raises:
        PolylaneError: an ``__init__`` does not call that of ``nn.Module``.
    """
    try:
        for _ in model.named_modules():
            pass
    except AttributeError as error:
        raise PolylaneError(
            f"the modules of the model cannot be listed ({describe_message(error)}): an __init__ must call "
            "super().__init__() before all else"
        ) from error


def refuse_unusable_settings() -> None:
    """Refuse settings of torch, which user code has left as they are, under which nothing can be trained.

    Raises:
        PolylaneError: gradients are switched off, or tensors are made without values; it says what to do instead.
    """
    if torch.is_inference_mode_enabled() or not torch.is_grad_enabled():
        raise PolylaneError(
            "gradients are switched off (torch.set_grad_enabled(False), or a mode of inference), so that nothing can "
            "be trained: switch them off where they are not wanted only, in `with torch.no_grad():`"
        )
    if torch.get_default_device().type == "meta":
        raise PolylaneError(
            "torch's default device is meta (torch.set_default_device), so that batches and random numbers would have "
            "no values: build the model in `with torch.device('meta'):`, and leave the default as it is"
        )


def _refuse_unusable_parameters(module: nn.Module, prefix: str) -> None:
    """Refuse parameters of a module itself that cannot be updated, sent or written.

    Raises:
        PolylaneError: it names the first of them, and what to do.
    """
    for name, parameter in module.named_parameters(prefix, recurse=False):
        try:
            name.encode()
        except UnicodeEncodeError:
            raise PolylaneError(f"the parameter {name} has a name that is no text, which no file can hold") from None
        if parameter.is_nested or parameter.is_quantized or parameter.layout is not torch.strided:
            kind = "nested" if parameter.is_nested else "quantized" if parameter.is_quantized else parameter.layout
            raise PolylaneError(
                f"the parameter {name} is {kind}, and only dense ones can be trained: make it dense, as "
                "nn.Parameter(value.to_dense()) does"
            )
        if any(stride == 0 and size > 1 for stride, size in zip(parameter.stride(), parameter.shape, strict=True)):
            raise PolylaneError(
                f"several elements of the parameter {name} are the same memory, as of a tensor that was expanded, "
                "which torch cannot update in place: give it memory of its own, as nn.Parameter(value.clone()) does; "
                "expand it in forward instead"
            )


def refuse_unusable_modules(model: nn.Module) -> None:
    """Refuse a model with modules that cannot be captured, or that divide the training themselves.

    Raises:
        PolylaneError: it names the first of them, and what to do.
    """
    for path, module in model.named_modules():
        name = path or "the model"
        for kind in type(module).__mro__:
            if does := _WRAPPERS.get((kind.__module__, kind.__qualname__)):
                raise PolylaneError(
                    f"{name} is wrapped in {kind.__name__}, which {does} itself: give the module inside, its .module"
                )
        if isinstance(module, torch.jit.ScriptModule):
            raise PolylaneError(
                f"{name} was made by torch.jit, and only what is written in Python can be captured: give the module "
                "that it was made of"
            )
        if any(is_lazy(tensor) for tensor in (*module._parameters.values(), *module._buffers.values())):
            raise PolylaneError(
                f"{name} is a lazy module, whose parameters have no shape yet: call the model once on a batch before "
                "you return it"
            )
        _refuse_unusable_parameters(module, path)
