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
