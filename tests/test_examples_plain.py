"""Every example and every model of the tests trains as plain PyTorch, on one device, without polylane."""

import importlib
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polylane.recipe import Mean, RecipeError, load
from tests.support.models import CASES, EXAMPLES, TINY, Case, example_case

# Of every example, at the sizes of models.TINY: what the model gives for a batch of 6.
OUTPUTS = {
    "digits": (6, 10),
    "gpt": (6, 16, 32),
    "unet": (6, 2, 32, 32),
    "inception": (6, 10),
    "two_devices": (6, 10),
    "hf_llama": (6, 16, 32),
    "hf_gpt2": (6, 16, 32),
}


def train(case: Case, steps: int = 2, samples: int = 6) -> list[float]:
    """The losses of some plain steps on one batch."""
    torch.manual_seed(0)
    model = case.model()
    pairs = list(model.named_parameters())
    optimizer = case.optimizer(pairs)
    scheduler = case.scheduler(optimizer) if case.scheduler else None
    batch = case.batch(samples, 0)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = case.loss(model, batch)
        loss = loss.value if isinstance(loss, Mean) else loss
        assert loss.shape == ()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for _, p in pairs if p.requires_grad)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", TINY)
def test_example_learns(name: str) -> None:
    losses = train(example_case(name), steps=6)
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("make", CASES.values(), ids=list(CASES))
def test_case_trains(make: Callable[[], Case]) -> None:
    losses = train(make(), samples=16)  # enough that no expert is idle and without a gradient
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("name", TINY)
def test_shapes(name: str) -> None:
    case = example_case(name)
    batch = case.batch(6, 0)
    with torch.no_grad():
        out = case.model()(batch["input_ids"] if isinstance(batch, dict) else batch[0])
    assert tuple((out if isinstance(out, Tensor) else out.logits).shape) == OUTPUTS[name]


def samples_of(name: str, split: str) -> list[Any]:
    data = load(EXAMPLES / f"{name}.py", TINY[name]).data(split)
    return [data[i] for i in (0, 1, len(data) - 1)]


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize("split", ["train", "test"])
def test_data_is_deterministic(name: str, split: str) -> None:
    first, second = tree_leaves(samples_of(name, split)), tree_leaves(samples_of(name, split))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", TINY)
def test_splits_differ_and_end(name: str) -> None:
    recipe = load(EXAMPLES / f"{name}.py", TINY[name])
    training, test = recipe.data("train"), recipe.data("test")
    assert len(training) > 3 * len(test) > 0
    assert not all(torch.equal(a, b) for a, b in zip(tree_leaves(training[0]), tree_leaves(test[0]), strict=True))
    with pytest.raises(IndexError):
        training[len(training)]


@pytest.mark.parametrize("make", [*CASES.values()], ids=list(CASES))
def test_batches_are_made_of_their_seed(make: Callable[[], Case]) -> None:
    batch = make().batch
    assert all(torch.equal(a, b) for a, b in zip(tree_leaves(batch(3, 5)), tree_leaves(batch(3, 5)), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(tree_leaves(batch(3, 5)), tree_leaves(batch(3, 6)), strict=True))
    assert all(leaf.shape[0] == 3 for leaf in tree_leaves(batch(3, 5)))


# What single examples are there to show


def test_digits_reaches_97_percent() -> None:
    recipe = load(EXAMPLES / "digits.py", {"width": "16", "blocks": "1"})
    torch.manual_seed(0)
    model = recipe.model()
    optimizer = recipe.optimizer(model.named_parameters())
    training, test = recipe.data("train"), recipe.data("test")
    for _ in range(6):
        for batch in torch.utils.data.DataLoader(training, 64, shuffle=True):
            optimizer.zero_grad()
            recipe.loss(model, batch).backward()  # type: ignore[union-attr]
            optimizer.step()
    model.eval()
    images, labels = test.tensors
    assert (model(images).argmax(1) == labels).float().mean() >= 0.97


def test_gpt_ties_its_embeddings_and_groups_its_parameters() -> None:
    case = example_case("gpt")
    model: Any = case.model()
    assert model.head.weight is model.token.weight
    optimizer = case.optimizer(model.named_parameters())
    decayed, kept = optimizer.param_groups
    names = {parameter: name for name, parameter in model.named_parameters()}
    assert "token.weight" in {names[parameter] for parameter in decayed["params"]}
    others = {names[parameter] for parameter in kept["params"]}
    assert {"position.weight", "norm.weight", "blocks.0.mlp.0.bias"} <= others
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    case.optimizer([("norm.weight", model.norm.weight)])  # a pipeline stage may have nothing that decays


def test_gpt_scheduler_warms_up_and_comes_down() -> None:
    recipe = load(EXAMPLES / "gpt.py", {"warmup": "4", "steps": "20"})
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    assert recipe.scheduler is not None
    scheduler = recipe.scheduler(optimizer)
    rates = []
    for _ in range(30):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates[20:] == pytest.approx([0.1] * 10)
    assert rates[4:21] == sorted(rates[4:21], reverse=True)


def test_gpt_sizes_of_model_and_data_are_set_together() -> None:
    with pytest.raises(RecipeError, match="did you mean 'layers'"):
        load(EXAMPLES / "gpt.py", {"layer": "3"})
    recipe = load(EXAMPLES / "gpt.py", {"seq_len": "8", "vocab": "20", "files": "2"})
    text, targets = recipe.data("train")[0]
    assert text.shape == targets.shape == (8,)
    assert torch.equal(text[1:], targets[:-1])
    assert max(int(sample[0].max()) for sample in recipe.data("train")) == 19
    assert recipe.model().position.weight.shape[0] == 8  # type: ignore[union-attr]


def test_unet_mean_is_exact_over_parts() -> None:
    case = example_case("unet")
    torch.manual_seed(0)
    model = case.model().eval()  # parts of a batch have other statistics than the whole
    pictures, masks = case.batch(6, 0)
    whole = case.loss(model, (pictures, masks))
    parts = [case.loss(model, (pictures[i:j], masks[i:j])) for i, j in [(0, 1), (1, 6)]]
    assert isinstance(whole, Mean)
    total = sum(part.total for part in parts if isinstance(part, Mean))
    count = sum(part.count for part in parts if isinstance(part, Mean))
    torch.testing.assert_close(total / count, whole.value)
    assert float(whole.count) < masks.numel()


def test_custom_function_has_a_backward_of_its_own() -> None:
    case = CASES["custom_function"]()
    torch.manual_seed(0)
    model: Any = case.model()
    case.loss(model, case.batch(8, 0)).backward()  # type: ignore[union-attr]
    assert model.fc1.weight.grad.abs().max() > 0  # the true derivative of a sign is zero


def test_gan_trains_both_networks_plainly(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(EXAMPLES), *sys.path])
    gan: Any = importlib.import_module("gan")
    torch.manual_seed(0)
    model = gan.model(width=16)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    images = torch.stack(gan.data("train")[:8])
    assert images.shape == (8, 64)
    for loss, optimizer, moved in [
        (gan.discriminator_loss, gan.discriminator_optimizer, "discriminator."),
        (gan.generator_loss, gan.generator_optimizer, "generator."),
    ]:
        model.zero_grad()
        start = {name: parameter.clone() for name, parameter in model.named_parameters()}
        loss(model, images).backward()
        optimizer(model.named_parameters()).step()
        changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, start[name])}
        assert changed == {name for name in before if name.startswith(moved)}
    gan.own_loop(model, epochs=3, batch_size=64)
    assert "epoch  3  discriminator" in capsys.readouterr().out
