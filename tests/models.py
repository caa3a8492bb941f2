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

EXAMPLES = Path(__file__).parent.parent / "examples"


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

        sizes = {"vocab_size": 32, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0))

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


class DenseNet(nn.Module):
    """Every layer reads all before it: values cross many stages."""

    def __init__(self, layers: int = 4, growth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(layers))
        self.convs = nn.ModuleList(nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(layers))
        self.fc = nn.Linear(growth * (layers + 1), 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for norm, conv in zip(self.norms, self.convs, strict=True):
            features.append(conv(F.relu(norm(torch.cat(features, 1)))))
        return self.fc(torch.cat(features, 1).mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to the one expert that its router prefers. The sizes depend on the data: not exportable."""

    def __init__(self, hidden: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(hidden, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(hidden, 2 * hidden), nn.GELU(), nn.Linear(2 * hidden, hidden))
            for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weight, choice = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            index = (choice == i).nonzero().squeeze(1)
            if index.numel() == 0:
                continue
            out = out.index_add(0, index, weight[index, None] * expert(flat[index]))
        return out.view_as(x)


class MoeBlock(nn.Module):
    def __init__(self, hidden: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.moe = Experts(hidden, experts)
        self.dropout = nn.Dropout(0.1)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(y))
        return x + self.moe(self.norm2(x))


class MoeGPT(nn.Module):
    def __init__(self, layers: int = 2, hidden: int = 16, vocab: int = 32) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(12, hidden)
        self.blocks = nn.ModuleList(MoeBlock(hidden, heads=4, experts=4) for _ in range(layers))
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, text: Tensor) -> Tensor:
        x = self.token(text) + self.position(torch.arange(text.shape[1], device=text.device))
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Sign(torch.autograd.Function):
    """Straight-through: forward is the sign, backward pretends it was the identity within [-1, 1], and doubles it.

    The true derivative is zero everywhere: a capture that drops this backward shows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradients[0] * (x.abs() <= 1).to(x.dtype)


class Binarized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2, self.fc3 = (
            nn.Linear(16, 32),
            nn.LayerNorm(32),
            nn.Linear(32, 32),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = Sign.apply(self.norm(self.fc1(x)))
        x = Sign.apply(self.fc2(x))
        return self.fc3(x)


class Encoder(nn.Module):
    """torch's own transformer layer, dropout inside its attention."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        layers = [nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True) for _ in range(2)]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(16, 32)

    def forward(self, text: Tensor) -> Tensor:
        return self.head(self.layers(self.token(text)))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(16, 32)

    def forward(self, text: Tensor) -> Tensor:
        hidden, _ = self.lstm(self.token(text))
        return self.head(hidden)


class InPlace(nn.Module):
    """Writes in place, alone and through views: never to be cut between the view and the write."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.conv1(x))
        shifted = x.new_zeros(x.shape)
        shifted[:, :, 1:] = x[:, :, :-1]
        shifted[:, :, :1].copy_(x[:, :, -1:])
        x = self.conv2(shifted)
        x += shifted
        return self.fc(self.relu(x).mean((2, 3)))


class Nested(nn.Module):
    """Its batch is a dictionary that holds tuples, and so is its output."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(16, 8)
        self.head = nn.Linear(24, 4)

    def forward(self, pair: tuple[Tensor, tuple[Tensor, Tensor]], scale: Tensor) -> dict[str, Any]:
        left, (right, both) = pair
        hidden = torch.cat([self.left(left), self.right(right), self.both(both)], 1).tanh()
        return {"logits": self.head(hidden * scale[:, None]), "hidden": (hidden, scale)}


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
        self.document = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, query: Tensor, document: Tensor) -> Tensor:
        return F.normalize(self.query(query)) @ F.normalize(self.document(document)).T


class Branching(nn.Module):
    """The root forward itself asks the data which way to go: no graph of it exists."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(16, 32), nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(x))
        if x.abs().sum() > 0:  # of the absolute values: a part of a batch must go the way of the whole
            hidden = F.relu(self.fc2(hidden))
        return self.fc3(hidden)


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


def branching() -> Case:
    return Case("branching", Branching, classify, vectors, sgd)


CASES: dict[str, Callable[[], Case]] = {
    function.__name__: function
    for function in (
        t5, vit, densenet, moe, custom_function, encoder, lstm, in_place, nested, towers, branching,
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
    "hf_llama": {**TEXT, "kv_heads": "2"},
    "hf_gpt2": TEXT,
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
