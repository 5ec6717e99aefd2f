#!/usr/bin/env python3
"""Write a model folder of DeepSeek-V3.2 shape, few layers and few experts, for ``--load-format dummy``.

    python bench/shape.py DIR [--layers 6] [--experts 64]

Widths, heads, ranks, quantization and sparse attention are the published model's; layers, experts and
vocabulary are fewer, so that it fits one GPU and starts in seconds.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def config(layers: int, experts: int) -> dict[str, Any]:
    """The ``config.json``."""
    return {
        "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "torch_dtype": "bfloat16",
        "vocab_size": 32000, "hidden_size": 7168, "num_hidden_layers": layers, "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "bos_token_id": 0, "eos_token_id": 1, "tie_word_embeddings": False, "max_position_embeddings": 163840,
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
        "quantization_config": {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
    }  # fmt: skip


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=64)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    (args.folder / "config.json").write_text(json.dumps(config(args.layers, args.experts), indent=1))
    # `bench` loads a tokenizer, and uses none.
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(args.folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 163840}
    (args.folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
