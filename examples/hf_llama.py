"""Hugging Face's Llama, unmodified, with random weights: rotary positions, grouped-query attention, SwiGLU.

polylane train examples/hf_llama.py --workers 2 --plan pipeline=2,microbatches=4 --steps 100
"""

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gpt


def model(
    layers: int = 4, hidden: int = 128, heads: int = 4, kv_heads: int = 2, seq_len: int = 128, vocab: int = 96
) -> nn.Module:
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=seq_len,
        bos_token_id=0,
        eos_token_id=0,
    )
    return LlamaForCausalLM(config)


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def optimizer(parameters, lr: float = 1e-3, weight_decay: float = 0.1):
    return torch.optim.AdamW(parameters, lr=lr, weight_decay=weight_decay)


def data(split: str, seq_len: int = 128, vocab: int = 96, files: int = 64) -> list[dict[str, Tensor]]:
    """The text of gpt.py; the model shifts the labels itself."""
    return [{"input_ids": tokens, "labels": tokens} for tokens, _ in gpt.data(split, seq_len, vocab, files)]
