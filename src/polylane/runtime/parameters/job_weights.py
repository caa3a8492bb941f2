"""Weights and gradients of a job: its optimizers, its parts of them, whole ones, and the file of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from polylane.runtime.progress.script_calls import collective
from polylane.runtime.workers.world import World


class JobWeights:
    """What a :class:`polylane.Job` says of its weights, gradients and optimizers."""

    world: World
    _role: Any
    _resolve_objective: Callable[[str | None], str]
    settle_audit: Callable[[], None]

    @property
    def optimizer(self) -> Any:
        """The optimizer (or list of optimizers) of the first loss, over the parameters that this worker holds.

        Examples:
            >>> job.optimizer.param_groups[0]["lr"]
            0.5
        """
        return self._role.optimizer_of(self._resolve_objective(None))

    def optimizer_of(self, objective: str) -> Any:
        """Return the optimizer (or list of optimizers) of one of several losses.

        Args:
            objective: name of the loss: its key in the mapping that was given to ``parallelize``, or "loss".

        Raises:
            PolylaneError: there is no loss of this name.

        Examples:
            >>> job.optimizer_of("loss") is job.optimizer
            True
        """
        return self._role.optimizer_of(self._resolve_objective(objective))

    def gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the last step's gradients of the parameters or shards that this worker holds, reduced and clipped.

        Args:
            objective: name of the loss, if there are several. Default: the first.

        Returns:
            Gradients by the model's parameter names; of a shard, in the shard's shape; None where there is none.

        Raises:
            PolylaneError: there is no loss of this name.

        Examples:
            >>> list(job.gradients())
            ['0.weight', '0.bias', '2.weight', '2.bias']
        """
        gradients: dict[str, Tensor | None] = self._role.gradients(self._resolve_objective(objective))
        return gradients

    @collective("job.whole_gradients")
    def whole_gradients(self, objective: str | None = None) -> dict[str, Tensor | None]:
        """Return the last step's full gradients of all parameters of a loss, on every worker's CPU; collective.

        The keys are the model's parameter names, in its order. The values equal ``parameter.grad`` on one device, after
        reduction and clipping; None for parameters without a gradient.

        Args:
            objective: name of the loss, if there are several. Default: the first.

        Raises:
            PolylaneError: there is no loss of this name.

        Examples:
            >>> job.whole_gradients()["2.weight"].shape
            torch.Size([3, 16])
        """
        gradients: dict[str, Tensor | None] = self._role.whole_gradients(self._resolve_objective(objective))
        return gradients

    @collective("job.state_dict")
    def state_dict(self, *, losses: bool = False) -> dict[str, Tensor]:
        """Return the state dict of the full model, on every worker's CPU; collective.

        If replicas differ, values are their mean. With ``losses``, includes tensors of losses as "loss.NAME".

        Args:
            losses: whether tensors of losses that are modules are included.

        Returns:
            Whole tensors, by the names of ``model.state_dict()``.

        Examples:
            >>> state = job.state_dict()
            >>> list(state)
            ['0.weight', '0.bias', '2.weight', '2.bias']
        """
        state: dict[str, Tensor] = self._role.state_dict(losses)
        return state

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load a state dict of the full model, the same on every worker; each keeps its own part.

        Args:
            state: whole tensors, by the names of ``model.state_dict()``.

        Raises:
            PolylaneError: a tensor is missing, unknown, or of another shape.

        Examples:
            >>> job.load_state_dict(state)
        """
        self._role.load_state_dict(state)

    @contextmanager
    def whole_model(self) -> Iterator[nn.Module]:
        """Context manager: ``model`` is complete on every worker; what all write alike is kept; collective.

        Yields:
            The model, with all of its weights and buffers.

        Examples:
            >>> with job.whole_model() as whole:
            ...     outputs = whole(x)
            >>> outputs.shape
            torch.Size([64, 3])
        """
        with self._role.whole_model(self.state_dict(losses=True)) as model:
            yield model

    @collective("job.save")
    def save(self, path: str | Path) -> None:
        """Write the weights of the full model to a safetensors file that the plain model can load; collective.

        An existing file is replaced once the new one is complete. Tensors of type complex128 are stored as
        ``NAME.real`` and ``NAME.imag``.

        Args:
            path: the file to write, on rank 0.

        Raises:
            NotFinite: on every worker, if a weight is NaN or infinite; an existing file is kept.
            PolylaneError: on rank 0, if the file cannot be written.

        Examples:
            >>> import safetensors.torch
            >>> job.save("model.safetensors")
            >>> list(safetensors.torch.load_file("model.safetensors"))
            ['0.bias', '0.weight', '2.bias', '2.weight']
        """
        self.settle_audit()
        self._role.save(Path(path))
