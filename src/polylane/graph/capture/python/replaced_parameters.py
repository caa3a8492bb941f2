"""Replaced parameters: what cannot work while tensors of the plan stand in the places of a module's own is refused."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.utils.checkpoint

from polylane.errors import PolylaneError

_ORIGINAL = torch.utils.checkpoint.CheckpointFunction


class _Refusals(threading.local):
    """Paths of the modules that run with other tensors in this thread, the innermost last."""

    def __init__(self) -> None:
        self.paths: list[str] = []


_refusals = _Refusals()


class _GuardedCheckpointFunction(_ORIGINAL):
    """torch's own function of reentrant checkpoints, but for threads in which a module's parameters are replaced.

    It stays in torch's place once it is there: replicas run as threads of one process, and a stand-in that each puts
    there and takes away again is left behind by the thread that came second.
    """

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call torch's function.

        Raises:
            PolylaneError: the parameters of a module are replaced in this thread.
        """
        if _refusals.paths:
            raise PolylaneError(
                f"{_refusals.paths[-1] or 'the model'} calls torch.utils.checkpoint with use_reentrant=True, in what "
                "runs as your own Python, where gradients would go past the plan: take use_reentrant=False"
            )
        return _ORIGINAL.apply(*args, **kwargs)


@contextmanager
def parameters_replaced(path: str) -> Iterator[None]:
    """Context manager: refuse, in this thread, what does not work with other tensors in the places of parameters.

    Args:
        path: of the module, as the user names it; "" for the whole model.

    Raises:
        PolylaneError: inside, torch.utils.checkpoint is called with use_reentrant=True, whose recomputation would send
            gradients to the module's own parameters; or a parameter is copied by copy.deepcopy.
    """
    # Only torch's own is replaced: while another thread captures, a stand-in of that capture is in its place.
    if torch.utils.checkpoint.CheckpointFunction is _ORIGINAL:
        torch.utils.checkpoint.CheckpointFunction = _GuardedCheckpointFunction  # type: ignore[misc]
    _refusals.paths.append(path)
    try:
        yield
    except RuntimeError as error:
        if "support the deepcopy protocol" not in str(error):
            raise
        raise PolylaneError(
            f"{path or 'the model'} copies its parameters with copy.deepcopy inside of its forward, in what runs as "
            "your own Python, where others are in their place: copy what it needs before, in __init__"
        ) from error
    finally:
        _refusals.paths.pop()
