"""The models of the tests: hand-written hard cases, and the examples at tiny sizes.

Every one is a ``Case``: what a recipe holds, plus a batch of any number of samples, equal for an equal seed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from polylane.recipe import Mean, load
from tests.support.hard_models import (
    Binarized,
    Branching,
    DenseNet,
    Encoder,
    InPlace,
    Latents,
    Lstm,
    MoeGPT,
    Nested,
    RoutedGPT,
    Separable,
    Towers,
)

EXAMPLES = Path(__file__).parents[2] / "examples"


@dataclass(frozen=True)
class Case:
    """A model to train: ``model()`` is freshly initialised, ``batch(samples, seed)`` is one batch.

    ``mean`` tells whether the loss is a mean over samples, so that a batch may be split.
    """

    name: str
    model: Callable[[], nn.Module]
    loss: Callable[[Any, Any], Tensor | Mean]
    batch: Callable[[int, int], Any]
    optimizer: Callable[[Iterable[tuple[str, nn.Parameter]]], Optimizer]
    scheduler: Callable[[Optimizer], Any] | None = None
    mean: bool = True


def sgd(parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, weight_decay=0.1)


def vectors(samples: int, seed: int, size: int = 16, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Random (samples, size) inputs and their labels."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(samples, size, generator=random), torch.randint(0, classes, (samples,), generator=random)


def images(samples: int, seed: int) -> tuple[Tensor, Tensor]:
    """Random (samples, 1, 8, 8) images and labels of 10 classes."""
    pixels, labels = vectors(samples, seed, 64, 10)
    return pixels.view(samples, 1, 8, 8), labels


def tokens(samples: int, seed: int, length: int = 12, vocab: int = 32) -> tuple[Tensor, Tensor]:
    """Random (samples, length) tokens, none of them 0, and their targets: the next token of each."""
    random = torch.Generator().manual_seed(seed)
    text = torch.randint(1, vocab, (samples, length + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels)


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def hf_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


# Hugging Face --------------------------------------------------------------------------------------------------------


def t5() -> Case:
    """Encoder and decoder, one tied embedding, labels shifted by in-place writes through views."""

    def model() -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_heads": 4}
        layers = {"num_layers": 1, "num_decoder_layers": 2}
        return T5ForConditionalGeneration(T5Config(**sizes, **layers, decoder_start_token_id=0))

    def batch(samples: int, seed: int) -> dict[str, Tensor]:
        inputs, _ = tokens(samples, seed)
        labels, _ = tokens(samples, seed + 1000, length=8)
        return {"input_ids": inputs, "labels": labels}

    return Case("t5", model, hf_loss, batch, adamw)


def vit() -> Case:
    """A vision transformer: patches, a class token, dropout in its attention too."""

    def model() -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"image_size": 8, "patch_size": 4, "num_channels": 1, "hidden_size": 16, "num_hidden_layers": 2}
        more = {"num_attention_heads": 4, "intermediate_size": 32, "num_labels": 10}
        dropout = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
        return ViTForImageClassification(ViTConfig(**sizes, **more, **dropout))

    def batch(samples: int, seed: int) -> dict[str, Tensor]:
        pixels, labels = images(samples, seed)
        return {"pixel_values": pixels, "labels": labels}

    return Case("vit", model, hf_loss, batch, adamw)


# By hand -------------------------------------------------------------------------------------------------------------


def densenet() -> Case:
    return Case("densenet", DenseNet, classify, images, sgd)


def moe() -> Case:
    return Case("moe", MoeGPT, next_token, tokens, adamw)


def custom_function() -> Case:
    return Case("custom_function", Binarized, classify, vectors, sgd)


def encoder() -> Case:
    return Case("encoder", Encoder, next_token, tokens, adamw)


def lstm() -> Case:
    return Case("lstm", Lstm, next_token, tokens, adamw)


def in_place() -> Case:
    return Case("in_place", InPlace, classify, images, sgd)


def nested() -> Case:
    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        out = model(batch["pair"], scale=batch["scale"])
        return F.cross_entropy(out["logits"], batch["label"]) + out["hidden"][0].square().mean()

    def batch(samples: int, seed: int) -> dict[str, Any]:
        (left, label), (right, _), (both, _) = (vectors(samples, seed + i * 1000) for i in range(3))
        return {"pair": (left, (right, both)), "scale": label + 1.0, "label": label}

    return Case("nested", Nested, loss, batch, sgd)


def towers() -> Case:
    """In-batch negatives: every sample's loss depends on all the others."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        scores = 10 * model(*batch)
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))

    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        return vectors(samples, seed)[0], vectors(samples, seed + 1000)[0]

    return Case("towers", Towers, loss, batch, sgd, mean=False)


def routed() -> Case:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        inputs, targets = batch
        logits, spread = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.01 * spread

    return Case("routed", RoutedGPT, loss, tokens, adamw)


def separable() -> Case:
    return Case("separable", Separable, classify, images, sgd)


def latents() -> Case:
    def batch(samples: int, seed: int) -> tuple[Tensor, Tensor]:
        text, _ = tokens(samples, seed)
        for sample in range(samples):
            text[sample, 4 + (3 * sample + seed) % 8 :] = 0
        return text, vectors(samples, seed)[1]

    return Case("latents", Latents, classify, batch, adamw)


def branching() -> Case:
    return Case("branching", Branching, classify, vectors, sgd)


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        t5, vit, densenet, moe, custom_function, encoder, lstm, in_place, nested, towers, routed, separable, latents,
        branching,
    )
}  # fmt: skip


# The examples --------------------------------------------------------------------------------------------------------

TEXT = {"layers": "2", "hidden": "16", "heads": "4", "seq_len": "16", "vocab": "32", "files": "4"}
TINY: dict[str, dict[str, str]] = {
    "digits": {"width": "4", "blocks": "1"},
    "gpt": {**TEXT, "warmup": "2", "steps": "6"},
    "unet": {"width": "4", "depth": "2"},
    "inception": {"width": "4", "blocks": "2"},
    "two_devices": {},
    "hf_llama": {**TEXT, "layers": "1", "kv_heads": "2"},
    "hf_gpt2": {**TEXT, "layers": "1"},
}


def example_case(name: str, **settings: str) -> Case:
    """The example of that name at tiny sizes; the batch of seed s is its s-th of the training data, in order."""
    recipe = load(EXAMPLES / f"{name}.py", {**TINY[name], **settings})
    collate = recipe.collate or default_collate

    @functools.cache
    def dataset() -> Any:
        return recipe.data("train")

    def batch(samples: int, seed: int) -> Any:
        data = dataset()
        return collate([data[(seed * samples + i) % len(data)] for i in range(samples)])

    return Case(name, recipe.model, recipe.loss, batch, recipe.optimizer, recipe.scheduler)
