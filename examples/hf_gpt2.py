"""Hugging Face's GPT-2, unmodified, with random weights: tied embeddings, its default dropouts, its own loss.

polylane train examples/hf_gpt2.py --workers 2 --plan pipeline=2,microbatches=4 --steps 100
"""

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, logging

from hf_llama import data  # the recipe next to this one: the same text

__all__ = ["data", "loss", "model", "optimizer"]

logging.set_verbosity_error()  # or every worker would warn that it takes the very loss we want


def model(layers: int = 4, hidden: int = 128, heads: int = 4, seq_len: int = 128, vocab: int = 96) -> nn.Module:
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=seq_len,
        n_embd=hidden,
        n_layer=layers,
        n_head=heads,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def optimizer(parameters, lr: float = 1e-3, weight_decay: float = 0.1):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)
