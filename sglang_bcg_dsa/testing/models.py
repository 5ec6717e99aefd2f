"""Tiny models for the real server: a ``config.json`` each, weights are seeded at load.

Start the server with ``--load-format dummy --skip-tokenizer-init``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, get_args

ModelKind = Literal["dense", "moe", "mla", "dsa", "dsv4"]

VOCABULARY = 2048
INDEX_TOPK = 64

_COMMON: dict[str, Any] = {
    "torch_dtype": "float32",
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_OWN: dict[ModelKind, dict[str, Any]] = {
    "dense": {
        # Of the host's dense models, one that supports DP attention.
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
    },
    "moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_theta": 10000.0,
        "num_experts": 32,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    # One dense layer, then two with a shared expert and experts routed by group: DeepSeek-V3's
    # shape.
    "mla": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "rope_theta": 10000.0,
        # The host's model reads it without asking whether it is there.
        "rope_scaling": {
            "type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    },
}

# DeepSeek-V3.2's: the same with an indexer in each layer, which lets a token attend to 64 others.
# What the host fixes stays as it is: keys of 128, pages of 64.
_OWN["dsa"] = {
    **_OWN["mla"],
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_topk": INDEX_TOPK,
    "index_n_heads": 4,
    "index_head_dim": 128,
}

# DeepSeek-V4's: residual streams, a window of 128, groups of 4 chosen by an indexer, groups of 128.
# What the host fixes stays as it is: rows of 512, index keys of 128, pages of 256.
_OWN["dsv4"] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 2048,
    "num_hidden_layers": 4,
    "compress_ratios": [0, 4, 128, 4],
    "num_key_value_heads": 1,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 32,
    "o_lora_rank": 32,
    "o_groups": 2,
    "sliding_window": 128,
    "index_topk": INDEX_TOPK,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 4,
    "hc_eps": 1e-6,
    "num_hash_layers": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sqrtsoftplus",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "rope_theta": 10000.0,
    "compress_rope_theta": 40000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def write_model(directory: Path, kind: ModelKind) -> Path:
    """Write the ``config.json`` of a model of this kind into ``directory``; return that."""
    if kind not in get_args(ModelKind):
        raise ValueError(f"unknown model kind {kind!r}: expected one of {', '.join(_OWN)}")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**_COMMON, **_OWN[kind]}, indent=2))
    return directory
