#!/usr/bin/env python3
"""Write a model folder of a published shape, few layers and few experts, for ``--load-format dummy``.

    python bench/shape.py DIR [--family dsa|dsv4] [--layers 6] [--experts 64] [--context TOKENS]

``dsa`` is DeepSeek-V3.2, ``dsv4`` DeepSeek-V4-Flash. Widths, heads, ranks, context and sparse attention are the
published model's; layers, experts and vocabulary are fewer, so that it fits one GPU and starts in seconds. Weights
are block FP8. The published DeepSeek-V4 has FP4 experts instead, so serve this one with
``SGLANG_DSV4_FP4_EXPERTS=0``: no checkpoint is there to tell SGLang.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

FP8 = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0", "weight_block_size": [128, 128],
}  # fmt: skip


def dsa(layers: int, experts: int, context: int) -> dict[str, Any]:
    """DeepSeek-V3.2's ``config.json``."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16",
        "vocab_size": 32000, "hidden_size": 7168, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "max_position_embeddings": context,
        "num_attention_heads": 64, "num_key_value_heads": 64, "attention_bias": False, "attention_dropout": 0.0,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "intermediate_size": 4096, "moe_intermediate_size": 1024,
        "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
        "ep_size": 1, "num_nextn_predict_layers": 0,
        "rope_theta": 10000, "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 1.0,
        },
        "quantization_config": FP8,
    }  # fmt: skip


def dsv4(layers: int, experts: int, context: int) -> dict[str, Any]:
    """DeepSeek-V4-Flash's ``config.json``: two layers of the window alone, then ratios 4 and 128 in turns."""
    ratios = [0, 0, *([4, 128] * layers)]
    return {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "torch_dtype": "bfloat16",
        "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "max_position_embeddings": context,
        "num_attention_heads": 64, "num_key_value_heads": 1, "attention_bias": False, "attention_dropout": 0.0,
        "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_lora_rank": 1024, "o_groups": 8,
        "sliding_window": 128, "compress_ratios": ratios[:layers], "compress_rope_theta": 160000,
        "index_topk": 512, "index_n_heads": 64, "index_head_dim": 128,
        "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
        "moe_intermediate_size": 2048, "n_routed_experts": experts, "n_shared_experts": 1, "num_experts_per_tok": 6,
        "num_hash_layers": 3, "topk_method": "noaux_tc", "scoring_func": "sqrtsoftplus", "norm_topk_prob": True,
        "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "num_nextn_predict_layers": 0,
        "rope_theta": 10000, "rope_scaling": {
            "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
        },
        "quantization_config": FP8,
    }  # fmt: skip


FAMILIES = {"dsa": (dsa, 163_840), "dsv4": (dsv4, 1_048_576)}


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=sorted(FAMILIES), default="dsa")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--context", type=int, help="tokens (default: the published model's)")
    args = parser.parse_args()
    config, context = FAMILIES[args.family]
    context = args.context or context
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config(args.layers, args.experts, context), indent=1))
    # `bench` loads a tokenizer, and uses none.
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(args.folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": context}
    (args.folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
