"""Launch order of gradient buckets in a backward pass, equal on all ranks (Li et al., VLDB 2020, section 3.2.3)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from polylane.graph.python_state.gradient_hooks import OwnHook, put_own_hook, remove_own_hook


class BucketLauncher:
    """Launches buckets one after the other, each as soon as the gradients of all its parameters are complete.

    All ranks launch in the one order of the buckets, whichever gradients are complete first: backends match a
    collective to those of the other ranks by the order of the calls.

        gradients complete      b2    b0       b1      (end)
        launched                      b0       b1 b2   b3       b3 has a parameter without a gradient, or is not early

    Args:
        buckets: the parameters of each bucket by canonical name, in the order of launch.
        early: for each bucket whether it may be launched before the end of the pass. A bucket with a parameter that may
            get no gradient, or several, may not: only the end of the pass shows that its gradients are complete.
        late: number of buckets, the last ones, that the end of the pass does not launch either, see
            :meth:`launch_late`.
    """

    def __init__(self, buckets: Sequence[Mapping[str, Tensor]], early: Sequence[bool], late: int = 0) -> None:
        self._buckets, self._in_pass = tuple(buckets), len(buckets) - late
        self._early = [is_early and index < self._in_pass for index, is_early in enumerate(early)]
        self._missing: list[set[str]] = []
        self._next = 0

    def begin(self, launch: Callable[[int], None]) -> None:
        """Register hooks on all parameters; called before a backward pass.

        Args:
            launch: starts the reduction of the bucket with the given index.
        """
        self._missing, self._next = [set(bucket) for bucket in self._buckets], 0
        for index, bucket in enumerate(self._buckets):
            for name, parameter in bucket.items():
                put_own_hook(parameter, self, OwnHook(self._on_gradient(index, name, launch)))

    def _on_gradient(self, index: int, name: str, launch: Callable[[int], None]) -> Callable[[Tensor], None]:
        def complete(_: Tensor) -> None:
            self._missing[index].discard(name)
            # This gradient may also release later buckets, which were complete but behind this one in the order.
            while self._next < len(self._buckets) and not self._missing[self._next] and self._early[self._next]:
                self._launch_next(launch)

        return complete

    def _launch_next(self, launch: Callable[[int], None]) -> None:
        self._next += 1
        launch(self._next - 1)

    def end(self, launch: Callable[[int], None]) -> None:
        """Remove the hooks and launch the remaining buckets but the late ones; called after the backward pass."""
        for bucket in self._buckets:
            for parameter in bucket.values():
                remove_own_hook(parameter, self)
        while self._next < self._in_pass:
            self._launch_next(launch)

    def launch_late(self, launch: Callable[[int], None]) -> None:
        """Launch the late buckets; called when the worker has sent all its messages of the step."""
        while self._next < len(self._buckets):
            self._launch_next(launch)
