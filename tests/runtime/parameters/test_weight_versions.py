"""Weight versions: each batch computes on those of its forward pass, and no more are kept than theory says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polylane.runtime.parameters.weight_versions import WeightVersions


def train(delay: int, ahead: int, batches: int) -> tuple[list[float], list[float], int]:
    """Begin ``ahead`` batches before the first update: the value that each batch read, before and after, and the most
    versions that were kept."""
    weight = nn.Parameter(torch.zeros(2))
    versions, began, ended, read = WeightVersions({"w": weight}, delay), dict[int, float](), dict[int, float](), {}
    for step in range(batches + ahead):
        if step < batches:
            read[step] = versions.begin(step)["w"]
            began[step] = read[step][0].item()
        if (batch := step - ahead) >= 0:
            ended[batch] = read.pop(batch)[0].item()
            versions.begin_update()
            with torch.no_grad():
                weight += 1
            versions.end(batch)
    versions.restart()
    assert weight[0].item() == batches
    return list(began.values()), list(ended.values()), versions.most


@pytest.mark.parametrize("delay", [0, 1, 2, 5])
def test_stashing_keeps_one_more_than_is_lacking(delay: int) -> None:
    """A stage with as many stages behind it as its weights lack updates."""
    began, ended, most = train(delay, delay, 12)
    assert began == ended == [max(0, batch - delay) for batch in range(12)]
    assert most == delay + 1


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_all_stages_keep_as_many_with_vertical_sync(ahead: int) -> None:
    began, ended, most = train(3, ahead, 12)
    assert began == ended == [max(0, batch - 3) for batch in range(12)]
    assert most == 4


@pytest.mark.parametrize("ahead", [0, 1])
def test_two_versions_with_one_update_late(ahead: int) -> None:
    assert train(1, ahead, 12)[2] == 2


def test_an_empty_pipeline_begins_with_the_newest() -> None:
    weight = nn.Parameter(torch.zeros(1))
    versions = WeightVersions({"w": weight}, 2)
    for batch in range(3):
        versions.begin(batch)
    for batch in range(3):
        versions.begin_update()
        with torch.no_grad():
            weight += 1
        versions.end(batch)
    assert versions.begin(3)["w"].item() == 1.0  # in the steady state
    versions.begin_update()
    with torch.no_grad():
        weight += 1
    versions.end(3)
    versions.restart()
    assert versions.begin(4)["w"].item() == 4.0
    assert versions.count() == 1


def test_gradients_are_of_their_own_version() -> None:
    weight = nn.Parameter(torch.ones(1))
    versions = WeightVersions({"w": weight}, 1)
    first, second = versions.begin(0)["w"], None
    loss = (first**2).sum()
    second = versions.begin(1)["w"]
    loss.backward()
    versions.load_gradients(0)
    assert weight.grad is not None and weight.grad.item() == 2.0 and first.grad is None
    versions.begin_update()
    with torch.no_grad():
        weight -= 0.5
    versions.end(0)
    assert second.item() == 1.0 and weight.item() == 0.5
