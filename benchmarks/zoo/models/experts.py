"""Mixtures of experts, state-space models and linear attention, of transformers."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.entry import Family, own_loss, tokens
from benchmarks.zoo.models.language import GROUPED, SPECIAL, VOCABULARY, Batches, from_transformers, translations

EXPERTS = Family("experts", "Mixtures of experts, state-space models, linear attention")


def add(name: str, model: str, config: str, batches: Batches, **how: Any) -> None:
    """Enter a language model that returns its own loss."""
    made = from_transformers(model, config, **{"vocab_size": VOCABULARY, **SPECIAL, **how})
    EXPERTS.add(name, "transformers", made, own_loss, batches)


# Mixtures of experts --------------------------------------------------------------------------------------------------

add("Mixtral", "MixtralForCausalLM", "MixtralConfig", tokens(), **GROUPED, num_local_experts=4)
add(
    "Mixtral, balanced",
    "MixtralForCausalLM",
    "MixtralConfig",
    tokens(),
    **GROUPED,
    num_local_experts=4,
    output_router_logits=True,
)
FINE: dict[str, Any] = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2}
add(
    "Qwen2-MoE",
    "Qwen2MoeForCausalLM",
    "Qwen2MoeConfig",
    tokens(),
    **FINE,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=64,
)
add("OLMoE", "OlmoeForCausalLM", "OlmoeConfig", tokens(), **FINE)
add(
    "DeepSeek-V3",
    "DeepseekV3ForCausalLM",
    "DeepseekV3Config",
    tokens(),
    **{**GROUPED, "num_key_value_heads": 4},
    moe_intermediate_size=32,
    n_routed_experts=4,
    num_experts_per_tok=2,
    n_shared_experts=1,
    n_group=2,
    topk_group=1,
    first_k_dense_replace=1,
    kv_lora_rank=16,
    q_lora_rank=16,
    qk_rope_head_dim=8,
    qk_nope_head_dim=8,
    v_head_dim=8,
)
add(
    "Switch Transformers",
    "SwitchTransformersForConditionalGeneration",
    "SwitchTransformersConfig",
    translations(),
    d_model=32,
    d_kv=8,
    d_ff=64,
    num_layers=2,
    num_decoder_layers=2,
    num_heads=4,
    num_experts=4,
    num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1,
    expert_capacity=32,
    decoder_start_token_id=0,
)

# State-space models and linear attention ------------------------------------------------------------------------------

add("Mamba", "MambaForCausalLM", "MambaConfig", tokens(), hidden_size=32, num_hidden_layers=2, state_size=8)
add(
    "Mamba-2",
    "Mamba2ForCausalLM",
    "Mamba2Config",
    tokens(),
    hidden_size=32,
    num_hidden_layers=2,
    state_size=8,
    num_heads=4,
    head_dim=16,
    n_groups=2,
    chunk_size=8,
)
add("RWKV", "RwkvForCausalLM", "RwkvConfig", tokens(), hidden_size=32, num_hidden_layers=2, context_length=32)
add(
    "RecurrentGemma",
    "RecurrentGemmaForCausalLM",
    "RecurrentGemmaConfig",
    tokens(),
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=1,
    intermediate_size=96,
    lru_width=32,
    attention_window_size=8,
)
add(
    "Jamba",
    "JambaForCausalLM",
    "JambaConfig",
    tokens(),
    **FINE,
    attn_layer_period=2,
    attn_layer_offset=1,
    expert_layer_period=2,
    expert_layer_offset=1,
    mamba_d_state=8,
    use_mamba_kernels=False,
)
