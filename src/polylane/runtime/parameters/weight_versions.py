"""Weight versions of an asynchronous pipeline: those on which batches under way compute, kept beside the newest.

Weight stashing (Narayanan et al., "PipeDream", SOSP 2019, section 3.3): the backward pass of a batch uses the weights
of its forward pass, though updates of earlier batches have come in between.

    update         0        1        2        3
    kept           v0       v0 v1    v1 v2    v2 v3      a stage whose weights lack one update
    batch 1 uses   v0 .............. v0
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class WeightVersions:
    """Versions of one worker's trained parameters; version v has v updates in it.

    A version is a set of leaf tensors, so that each collects its gradients by itself. The newest shares the parameters'
    own memory; before an update these get memory of their own if a batch still needs the version that they hold.

    Args:
        parameters: the parameters that the worker's stage trains, by canonical name.
        delay: updates that the weights lack on which a batch computes, in the steady state.

    Attributes:
        newest: number of updates so far.
        most: most versions that were kept at once.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], delay: int) -> None:
        self._parameters, self._delay = dict(parameters), delay
        self._leaves: dict[int, dict[str, Tensor]] = {}
        # Batches under way: number -> the version that they compute on.
        self._used: dict[int, int] = {}
        self._restarted_at = 0  # number of the first batch after the pipeline was empty
        self._next_batch = 0
        self.newest, self.most = 0, 0

    def begin(self, batch: int) -> dict[str, Tensor]:
        """Return the tensors on which a batch computes, by parameter name, and keep them until :meth:`end`.

        After the pipeline was empty all updates have been made, and the weights lack none of those.
        """
        version = max(self._restarted_at, batch - self._delay)
        self._used[batch], self._next_batch = version, batch + 1
        if version not in self._leaves:
            assert version == self.newest, "a version that is needed later was kept"
            self._keep_newest()
        self.most = max(self.most, self.count())
        return self._leaves[version]

    def load_gradients(self, batch: int) -> None:
        """Move the gradients that a batch has collected into the parameters' own."""
        for name, leaf in self._leaves[self._used[batch]].items():
            self._parameters[name].grad, leaf.grad = leaf.grad, None

    def begin_update(self) -> None:
        """Give the parameters memory of their own where a batch needs the values that an update would overwrite."""
        if self._is_needed(self.newest, besides=min(self._used)):
            self._keep_newest()
            for parameter in self._parameters.values():
                parameter.data = parameter.data.clone(memory_format=torch.preserve_format)

    def end(self, batch: int) -> None:
        """Record a batch's update, and drop the versions that nothing needs any more."""
        del self._used[batch]
        self.newest += 1
        self._leaves = {version: leaves for version, leaves in self._leaves.items() if self._is_needed(version)}
        self.most = max(self.most, self.count())

    def restart(self) -> None:
        """Record that the pipeline is empty: the next batch computes on the newest weights."""
        assert not self._used
        self._restarted_at = self._next_batch = self.newest
        self._leaves = {}

    def count(self) -> int:
        """Return how many versions are kept, the newest among them."""
        return len({*self._leaves, self.newest})

    def _is_needed(self, version: int, besides: int | None = None) -> bool:
        """Return whether a batch under way (other than ``besides``) or one to come computes on a version."""
        if any(used == version for batch, used in self._used.items() if batch != besides):
            return True
        # Batch b computes on version b - delay: the next one on the lowest that any batch to come needs.
        return version >= max(self._restarted_at, self._next_batch - self._delay)

    def _keep_newest(self) -> None:
        if self.newest not in self._leaves:
            self._leaves[self.newest] = {n: _leaf_of(p) for n, p in self._parameters.items()}


def _leaf_of(parameter: nn.Parameter) -> Tensor:
    """Return a leaf tensor with a parameter's memory."""
    return parameter.data.requires_grad_()
