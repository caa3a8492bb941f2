"""The rates of compressors are measured with the compressors that train, and a cluster file keeps them."""

from __future__ import annotations

import torch

from polylane.cluster import cluster_file
from polylane.cluster.spec import parse
from polylane.cost.network.compressed_reduction import PASSES
from polylane.probe import codec_speed


def test_every_codec_has_a_rate() -> None:
    found = codec_speed.measure_codecs(torch.device("cpu"), 0.01)
    assert set(found) == set(PASSES)
    # No codec is faster than the memory of any machine, and none takes a second for a megabyte.
    assert all(1e6 < rate < 1e12 for rate in found.values())


def test_a_cluster_file_may_have_rates_and_needs_none() -> None:
    plain = parse("2:cpu")
    host = plain.hosts[0]
    measured = host.model_copy(update={"device": host.device.model_copy(update={"codecs": {"top_k": 1e8}})})
    cluster = plain.__class__((measured,))
    assert "codecs" not in cluster_file.dump(plain)
    text = cluster_file.dump(cluster)
    assert "codecs" in text and "top_k" in text


def test_what_is_echoed_is_what_two_equal_ranks_would_sum() -> None:
    transport = codec_speed.EchoTransport()
    vector = torch.arange(4.0)
    assert torch.equal(transport.all_gather(vector, (0, 1)).wait(), torch.cat([vector, vector]))
    assert torch.equal(transport.all_reduce(vector.clone(), (0, 1)).wait(), 2 * vector)
