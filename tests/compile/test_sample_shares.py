"""Division of a batch: every sample is computed on once, by one replica, whatever the numbers."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polylane.compile.sample_shares import Batch, SampleShare, compute_shares, count_replica_samples, share_offsets

sizes = st.integers(1, 60)
degrees = st.integers(1, 9)


@given(sizes, degrees, degrees)
def test_every_sample_counts_once(batch: int, microbatches: int, replicas: int) -> None:
    counted = Counter[int]()
    for replica in range(replicas):
        for share in compute_shares(batch, microbatches, replicas, replica):
            if share.weight:
                counted.update(range(share.start, share.stop))
    assert counted == Counter(range(batch))


@given(sizes, degrees, degrees)
def test_all_replicas_run_the_same_microbatches(batch: int, microbatches: int, replicas: int) -> None:
    """So that each collective inside a pass has all its members; every worker computes on at least one sample."""
    each = [compute_shares(batch, microbatches, replicas, replica) for replica in range(replicas)]
    assert len({tuple(share.microbatch for share in own) for own in each}) == 1
    assert all(own and share.samples >= 1 and 0 <= share.start < share.stop <= batch for own in each for share in own)


@given(sizes, degrees, degrees)
def test_shares_differ_by_one_sample_and_follow_each_other(batch: int, microbatches: int, replicas: int) -> None:
    each = [compute_shares(batch, microbatches, replicas, replica) for replica in range(replicas)]
    last = 0
    for column in zip(*each, strict=True):  # one microbatch, by replica
        real = [share for share in column if share.weight]
        counts = [share.samples if share.weight else 0 for share in column]
        assert max(counts) - min(counts) <= 1 and counts == sorted(counts, reverse=True)
        for share in real:
            assert share.start == last
            last = share.stop
        # Who has none computes on the first sample of that microbatch, and counts for nothing.
        ghosts = [share for share in column if not share.weight]
        assert all((g.start, g.stop) == (real[0].start, real[0].start + 1) for g in ghosts)
    assert last == batch


@given(sizes, degrees, st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_unequal_shares_are_proportional(batch: int, microbatches: int, parts: list[int]) -> None:
    each = [compute_shares(batch, microbatches, parts, replica) for replica in range(len(parts))]
    for column in zip(*each, strict=True):
        counts = [share.samples * share.weight for share in column]
        assert all(abs(n - sum(counts) * part / sum(parts)) <= 1 for n, part in zip(counts, parts, strict=True))
    assert count_replica_samples(batch, microbatches, parts) == [sum(s.samples * s.weight for s in own) for own in each]
    taken = sorted(at for own in each for share in own if share.weight for at in range(share.start, share.stop))
    assert taken == list(range(batch))


def test_by_example() -> None:
    assert compute_shares(8, 2, 2, 1) == (SampleShare(0, 2, 4, 1), SampleShare(1, 6, 8, 1))
    assert compute_shares(5, 2, 2, 0) == (SampleShare(0, 0, 2, 1), SampleShare(1, 3, 4, 1))
    assert compute_shares(2, 3, 2, 1) == (SampleShare(0, 0, 1, 0), SampleShare(1, 1, 2, 0))  # nothing but stand-ins
    assert compute_shares(1, 4, 1, 0) == (SampleShare(0, 0, 1, 1),)


@given(sizes, degrees, degrees, st.data())
def test_a_worker_may_hold_all_or_its_own_samples_only(
    batch: int, microbatches: int, replicas: int, data: st.DataObject
) -> None:
    own = compute_shares(batch, microbatches, replicas, data.draw(st.integers(0, replicas - 1)))
    rows, constant = torch.arange(batch), "a constant"
    whole = Batch(batch, [rows, constant])
    part = Batch(batch, [torch.cat([rows[s.start : s.stop] for s in own]), constant], share_offsets(own))
    for share in own:
        assert (
            whole.leaves_of(share)[0].tolist()
            == part.leaves_of(share)[0].tolist()
            == list(range(share.start, share.stop))
        )
        assert whole.leaves_of(share)[1] == part.leaves_of(share)[1] == constant
    assert len(whole) == len(part) == batch


def test_what_is_split_is_told_by_the_example_not_by_the_size() -> None:
    rows, weights = torch.arange(3), torch.ones(3)
    share = SampleShare(0, 0, 2, 1)
    assert [len(leaf) for leaf in Batch(3, [rows, weights]).leaves_of(share)] == [2, 2]
    told = Batch(3, [rows, weights]).to_device((True, False), torch.device("cpu"))
    assert [len(leaf) for leaf in told.leaves_of(share)] == [2, 3]
    # An example of another form tells nothing.
    other = Batch(3, [rows, "text"]).to_device((True, True), torch.device("cpu"))
    assert [len(leaf) for leaf in other.leaves_of(share)] == [2, 4]


def test_a_whole_batch_of_any_nesting() -> None:
    batch = Batch.whole({"x": torch.zeros(4, 2), "y": (torch.zeros(4), 1.5)})
    assert batch.samples == 4 and len(batch.leaves) == 3 and batch.sampled == (True, True, False)


@pytest.mark.parametrize("microbatches", [1, 4])
def test_fewer_samples_than_workers(microbatches: int) -> None:
    own = [compute_shares(1, microbatches, 3, replica) for replica in range(3)]
    assert [share.weight for (share,) in own] == [1, 0, 0]
