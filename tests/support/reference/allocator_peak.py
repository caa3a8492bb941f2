"""The bytes that torch's own allocator hands out while something runs, as its profiler sees them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile


def allocator_peak(run: Callable[[], object]) -> int:
    """Run something, and return the most bytes of the CPU's tensors alive at a time, beyond those that were before.

    Unlike under a dispatch mode, autograd adds gradients up in place where it does without one. Freeing what was there
    before counts with a sign: the result may be below what the run itself allocates.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        run()
    result = seen.profiler.kineto_results  # type: ignore[union-attr]
    changes = sorted(
        (each.start_ns(), i, each.nbytes()) for i, each in enumerate(result.events()) if each.name() == "[memory]"
    )
    return max(accumulate((change for *_, change in changes), initial=0))
