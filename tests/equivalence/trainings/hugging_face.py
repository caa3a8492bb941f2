"""Trainings of models of transformers, whose losses count tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.equivalence.trainings.training import (
    AT_ONCE,
    IGNORED,
    SIZES,
    Training,
    chances,
    labels,
    seeded,
    training,
)
from tests.equivalence.trainings.uncounted_labels import padded_batches


def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss: Tensor = model(**batch).loss
    return loss


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "max_position_embeddings": 8}
    return LlamaForCausalLM(LlamaConfig(**sizes, **more, use_cache=False))


def bert(kind: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "max_position_embeddings": 8, "type_vocab_size": 1}
    still = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model: nn.Module = getattr(transformers, kind)(transformers.BertConfig(**sizes, **heads, **still, **more))
    return model


def causal_batches() -> list[dict[str, Tensor]]:
    """Whole sequences at first; then the labels of a prompt of unequal length, and of padding, do not count."""
    batches = []
    for step, samples in enumerate(SIZES):
        text = labels(step, samples, 6, classes=16)
        target, mask = text.clone(), torch.ones_like(text)
        if step:
            target[torch.arange(6) < labels(20 + step, samples, classes=5)[:, None]] = IGNORED
            target[0, 5:], mask[0, 5:] = IGNORED, 0
        batches.append({"input_ids": text, "attention_mask": mask, "labels": target})
    return batches


@training
def hf_causal() -> Training:
    return Training(seeded(llama), own_loss, causal_batches, promoted=True)


@training
def hf_items_in_batch() -> Training:
    """How many labels count is counted by the loader, as Hugging Face's Trainer does."""

    def batches() -> list[dict[str, Tensor]]:
        found = causal_batches()
        return [{**each, "num_items_in_batch": (each["labels"][:, 1:] != IGNORED).sum()} for each in found]

    return Training(seeded(llama), own_loss, batches, AT_ONCE, promoted=True)


@training
def hf_masked() -> Training:
    """One masked token in each sequence at first; then as many as chance has it."""

    def batches() -> list[dict[str, Tensor]]:
        found = []
        for step, samples in enumerate(SIZES):
            text = labels(step, samples, 6, classes=15) + 1
            hidden = chances(step, samples, 6) < 0.35
            hidden[0, 2:4] = True
            if step == 0:
                hidden = (torch.arange(6) == 2).expand(samples, 6)
            target = torch.where(hidden, text, IGNORED)
            found.append({"input_ids": text.masked_fill(hidden, 0), "labels": target})
        return found

    return Training(seeded(lambda: bert("BertForMaskedLM")), own_loss, batches, promoted=True)


@training
def hf_tokens() -> Training:
    def batches() -> list[dict[str, Tensor]]:
        found = []
        for text, tags in padded_batches():
            found.append({"input_ids": text, "attention_mask": (text != 0).long(), "labels": tags})
        return found

    def model() -> nn.Module:
        return bert("BertForTokenClassification", num_labels=4, classifier_dropout=0.0)

    return Training(seeded(model), own_loss, batches, promoted=True)
