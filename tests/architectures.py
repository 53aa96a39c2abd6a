"""Tiny random models of many architectures."""

from __future__ import annotations

import torch
import transformers as tf

VOCAB = 64
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
GQA = SMALL | {"num_key_value_heads": 2}
HEAD = GQA | {"head_dim": 8}
WINDOW = {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GPT2 = {"vocab_size": VOCAB, "n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 4}

ARCHITECTURES = {
    "llama": (tf.LlamaConfig, GQA),
    "llama, tied head": (tf.LlamaConfig, GQA | {"tie_word_embeddings": True}),
    "qwen2": (tf.Qwen2Config, GQA),
    "qwen2, window": (tf.Qwen2Config, GQA | WINDOW | {"use_sliding_window": True, "max_window_layers": 0}),
    "qwen3": (tf.Qwen3Config, HEAD),
    "qwen3_moe": (tf.Qwen3MoeConfig, HEAD | EXPERTS),
    "mixtral": (tf.MixtralConfig, GQA | {"num_local_experts": 4}),
    "mistral, window": (tf.MistralConfig, HEAD | {"sliding_window": 6}),
    "gpt_neox": (tf.GPTNeoXConfig, SMALL | {"rotary_pct": 0.5}),
    "gpt2": (tf.GPT2Config, GPT2),
    "opt": (tf.OPTConfig, SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gemma": (tf.GemmaConfig, HEAD),
    "gemma2": (tf.Gemma2Config, HEAD | {"sliding_window": 6, "query_pre_attn_scalar": 8}),
    "gemma3": (tf.Gemma3TextConfig, HEAD | WINDOW | {"query_pre_attn_scalar": 8}),
    "phi": (tf.PhiConfig, SMALL),
    "phi3": (tf.Phi3Config, GQA | {"pad_token_id": 0}),
    "olmo2": (tf.Olmo2Config, GQA),
    "cohere": (tf.CohereConfig, GQA | {"logit_scale": 0.25}),
    "granite": (tf.GraniteConfig, GQA | {"logits_scaling": 4.0}),
    "gpt_oss": (tf.GptOssConfig, HEAD | WINDOW | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "starcoder2": (tf.Starcoder2Config, GQA),
    "stablelm": (tf.StableLmConfig, GQA),
    "glm4": (tf.Glm4Config, HEAD | {"pad_token_id": 0}),
    "smollm3": (tf.SmolLM3Config, GQA | {"pad_token_id": 0}),
    "nemotron": (tf.NemotronConfig, GQA),
}


def make(name: str, **changes):
    """A tiny model with weights large enough that a mistake shows."""
    config_class, options = ARCHITECTURES[name]
    config = config_class(**(options | changes))
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
        if model.get_output_embeddings().bias is not None:
            model.get_output_embeddings().bias.normal_()
    return model.eval()
