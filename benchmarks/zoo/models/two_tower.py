"""Two towers, of transformers: images, sounds or sentences beside texts, each matched with its own of the batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.zoo.entry import SAMPLES, Family, numbers, tokens
from benchmarks.zoo.models.language import BERT, SMALL, SPECIAL, VOCABULARY, Batches, from_transformers

TWO_TOWER = Family("two_tower", "Two towers: contrastive losses")

SIDE = 16
TEXT: dict[str, Any] = {**BERT, **SPECIAL, "vocab_size": VOCABULARY, "projection_dim": 16}
IMAGE: dict[str, Any] = {**SMALL, "image_size": SIDE, "patch_size": 8, "projection_dim": 16}


def pairs(name: str, *sizes: int, masked: bool = True) -> Batches:
    """Batches of ragged texts, each beside a tensor of the other tower."""

    def batch(step: int, text: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = ("input_ids", "attention_mask") if masked else ("input_ids",)
        other = torch.randn(SAMPLES, *sizes, generator=numbers(4000 + step))
        return {**{each: text[each] for each in kept}, name: other}

    return lambda steps: [batch(step, text) for step, text in enumerate(tokens(8, VOCABULARY)(steps))]


def returned_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own contrastive loss."""
    loss: Tensor = model(**batch, return_loss=True).loss
    return loss


def sentence_pairs(steps: int) -> list[tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Batches of questions and their answers, ragged texts both."""
    every = [
        {name: text[name] for name in ("input_ids", "attention_mask")} for text in tokens(10, VOCABULARY)(2 * steps)
    ]
    return list(zip(every[::2], every[1::2], strict=True))


def in_batch_negatives(model: Any, batch: tuple[dict[str, Tensor], dict[str, Tensor]]) -> Tensor:
    """Each question's answer among all answers of the batch, by the mean of their tokens (as sentence embeddings)."""

    def embed(text: dict[str, Tensor]) -> Tensor:
        states, mask = model(**text).last_hidden_state, text["attention_mask"].unsqueeze(-1)
        return F.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    similarities = 20 * embed(batch[0]) @ embed(batch[1]).T
    return F.cross_entropy(similarities, torch.arange(len(similarities)))


TWO_TOWER.add(
    "CLIP",
    "transformers",
    from_transformers("CLIPModel", "CLIPConfig", text_config=TEXT, vision_config=IMAGE, projection_dim=16),
    returned_loss,
    pairs("pixel_values", 3, SIDE, SIDE),
)
TWO_TOWER.add(
    "SigLIP",
    "transformers",
    from_transformers("SiglipModel", "SiglipConfig", text_config={**TEXT, "projection_size": 32}, vision_config=IMAGE),
    returned_loss,
    pairs("pixel_values", 3, SIDE, SIDE, masked=False),
)
TWO_TOWER.add(
    "BLIP",
    "transformers",
    from_transformers(
        "BlipForImageTextRetrieval",
        "BlipConfig",
        text_config={**TEXT, "encoder_hidden_size": 32, "sep_token_id": 2},
        vision_config=IMAGE,
        image_text_hidden_size=16,
    ),
    lambda model, batch: F.cross_entropy(model(**batch).itm_score, batch["input_ids"][:, 1] % 2),
    pairs("pixel_values", 3, SIDE, SIDE),
)
TWO_TOWER.add(
    "CLAP",
    "transformers",
    from_transformers(
        "ClapModel",
        "ClapConfig",
        text_config=TEXT,
        audio_config={
            "spec_size": 32,
            "num_mel_bins": 8,
            "window_size": 4,
            "patch_size": 4,
            "patch_stride": [4, 4],
            "patch_embeds_hidden_size": 16,
            "depths": [1, 1],
            "num_attention_heads": [2, 4],
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "enable_fusion": False,
            "projection_dim": 16,
        },
        projection_dim=16,
    ),
    returned_loss,
    pairs("input_features", 1, 64, 8),
)
TWO_TOWER.add(
    "sentence embedding",
    "transformers",
    from_transformers("MPNetModel", "MPNetConfig", **BERT, **SPECIAL, vocab_size=VOCABULARY),
    in_batch_negatives,
    sentence_pairs,
)
