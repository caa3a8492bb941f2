"""Language models, of transformers: encoders, decoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.entry import CLASSES, SAMPLES, Family, numbers, own_loss, tokens

LANGUAGE = Family("language", "Language models: encoders, decoders, encoder-decoders")

VOCABULARY = 64
IGNORED = -100  # label of a token that does not count

Batches = Callable[[int], list[dict[str, Tensor]]]


def from_transformers(model: str, config: str, **how: Any) -> Callable[[], nn.Module]:
    """A model of transformers, by the names of its class and of its configuration's, with random weights."""

    def make() -> nn.Module:
        import transformers

        made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**how))
        return made

    return make


def masked_tokens(length: int = 12, mask_id: int = 2) -> Batches:
    """Batches of ragged texts in which some tokens are hidden: labels are these tokens, and -100 everywhere else."""

    def batch(step: int, text: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.rand(text["input_ids"].shape, generator=numbers(2000 + step)) < 0.3
        hidden[:, 1] = True  # one of each text at least
        hidden &= text["attention_mask"] == 1
        labels = text["input_ids"].masked_fill(~hidden, IGNORED)
        return {**text, "input_ids": text["input_ids"].masked_fill(hidden, mask_id), "labels": labels}

    return lambda steps: [batch(step, text) for step, text in enumerate(tokens(length, VOCABULARY)(steps))]


def labelled_texts(length: int = 12, classes: int = CLASSES) -> Batches:
    """Batches of ragged texts with one label each."""

    def labels(step: int) -> Tensor:
        return torch.randint(0, classes, (SAMPLES,), generator=numbers(2000 + step))

    return lambda steps: [{**text, "labels": labels(i)} for i, text in enumerate(tokens(length, VOCABULARY)(steps))]


def translations(length: int = 12, target_length: int = 9) -> Batches:
    """Batches of ragged texts with other ragged texts as their labels."""

    def batches(steps: int) -> list[dict[str, Tensor]]:
        sources, targets = tokens(length, VOCABULARY)(steps), tokens(target_length, VOCABULARY)(2 * steps)[steps:]
        return [{**one, "labels": other["labels"]} for one, other in zip(sources, targets, strict=True)]

    return batches


def add(name: str, model: str, config: str, batches: Batches, **how: Any) -> None:
    """Enter a language model that returns its own loss."""
    made = from_transformers(model, config, **{"vocab_size": VOCABULARY, **SPECIAL, **how})
    LANGUAGE.add(name, "transformers", made, own_loss, batches)


SPECIAL: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# The sizes of most configurations, by their usual names.
SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 32}
BERT: dict[str, Any] = {**SMALL, "max_position_embeddings": 32}

# Encoders -------------------------------------------------------------------------------------------------------------

add("BERT", "BertForMaskedLM", "BertConfig", masked_tokens(), **BERT)
add("RoBERTa", "RobertaForSequenceClassification", "RobertaConfig", labelled_texts(), **BERT, num_labels=CLASSES)
add(
    "DistilBERT",
    "DistilBertForSequenceClassification",
    "DistilBertConfig",
    labelled_texts(),
    dim=32,
    n_layers=2,
    n_heads=4,
    hidden_dim=64,
    max_position_embeddings=32,
    num_labels=CLASSES,
)
add("ALBERT", "AlbertForMaskedLM", "AlbertConfig", masked_tokens(), **BERT, embedding_size=16)
add(
    "ELECTRA",
    "ElectraForTokenClassification",
    "ElectraConfig",
    tokens(),
    **BERT,
    embedding_size=16,
    num_labels=VOCABULARY,
)
add(
    "DeBERTa-v2",
    "DebertaV2ForMaskedLM",
    "DebertaV2Config",
    masked_tokens(),
    **BERT,
    relative_attention=True,
    position_buckets=8,
    pos_att_type=["p2c", "c2p"],
)
add(
    "ModernBERT",
    "ModernBertForMaskedLM",
    "ModernBertConfig",
    masked_tokens(),
    **BERT,
    cls_token_id=1,
    sep_token_id=2,
    local_attention=4,
)
add(
    "Funnel",
    "FunnelForMaskedLM",
    "FunnelConfig",
    masked_tokens(),
    block_sizes=[1, 1],
    d_model=32,
    n_head=4,
    d_head=8,
    d_inner=64,
    num_decoder_layers=1,
)
add("Longformer", "LongformerForMaskedLM", "LongformerConfig", masked_tokens(), **BERT, attention_window=4)
add(
    "BigBird",
    "BigBirdForMaskedLM",
    "BigBirdConfig",
    masked_tokens(64),
    **{**BERT, "max_position_embeddings": 64},
    block_size=4,
    num_random_blocks=1,
)

# Decoders -------------------------------------------------------------------------------------------------------------

add("GPT-2", "GPT2LMHeadModel", "GPT2Config", tokens(), n_embd=32, n_layer=2, n_head=4, n_positions=32)
add("GPT-NeoX", "GPTNeoXForCausalLM", "GPTNeoXConfig", tokens(), **BERT)
add(
    "OPT",
    "OPTForCausalLM",
    "OPTConfig",
    tokens(),
    hidden_size=32,
    word_embed_proj_dim=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    ffn_dim=64,
    max_position_embeddings=32,
)
add("Llama", "LlamaForCausalLM", "LlamaConfig", tokens(), **GROUPED)
add("Mistral", "MistralForCausalLM", "MistralConfig", tokens(), **GROUPED, sliding_window=4)
GEMMA: dict[str, Any] = {**GROUPED, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
add("Gemma 2", "Gemma2ForCausalLM", "Gemma2Config", tokens(), **GEMMA)
add(
    "Gemma 3",
    "Gemma3ForCausalLM",
    "Gemma3TextConfig",
    tokens(),
    **GEMMA,
    layer_types=["sliding_attention", "full_attention"],
)
add("Qwen2", "Qwen2ForCausalLM", "Qwen2Config", tokens(), **GROUPED)
add("Qwen3", "Qwen3ForCausalLM", "Qwen3Config", tokens(), **GROUPED, head_dim=8)
add("Phi", "PhiForCausalLM", "PhiConfig", tokens(), **GROUPED)
add("Falcon", "FalconForCausalLM", "FalconConfig", tokens(), **BERT)
add("BLOOM", "BloomForCausalLM", "BloomConfig", tokens(), hidden_size=32, n_layer=2, n_head=4)
add("MPT", "MptForCausalLM", "MptConfig", tokens(), d_model=32, n_heads=4, n_layers=2, max_seq_len=32)
add("StableLM", "StableLmForCausalLM", "StableLmConfig", tokens(), **GROUPED)

# Encoder-decoders -----------------------------------------------------------------------------------------------------

add(
    "T5",
    "T5ForConditionalGeneration",
    "T5Config",
    translations(),
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_heads=4,
    decoder_start_token_id=0,
)
BART: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
}
add("BART", "BartForConditionalGeneration", "BartConfig", translations(), **BART)
add("Pegasus", "PegasusForConditionalGeneration", "PegasusConfig", translations(), **BART)
add("mBART", "MBartForConditionalGeneration", "MBartConfig", translations(), **BART)
add("Marian", "MarianMTModel", "MarianConfig", translations(), **BART)
