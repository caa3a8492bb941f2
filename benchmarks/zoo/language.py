"""Language models, of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from benchmarks.zoo.entry import Family, own_loss, tokens

LANGUAGE = Family("language", "Language models: encoders, decoders, encoder-decoders")


def from_transformers(model: str, config: str, **how: Any) -> Callable[[], nn.Module]:
    """A model of transformers, by the names of its class and of its configuration's, with random weights."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**how))
        return made

    return make


LANGUAGE.add(
    "GPT-2",
    "transformers",
    from_transformers("GPT2LMHeadModel", "GPT2Config", vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=32),
    own_loss,
    tokens(),
)
