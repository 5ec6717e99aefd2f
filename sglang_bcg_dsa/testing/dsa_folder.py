"""The folder that gives DSA its kernel libraries on a CPU, and how to start a server with it.

Imports nothing heavy.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

SERVER_ARGS = (
    *("--attention-backend", "dsa", "--kv-cache-dtype", "bfloat16"),
    # The one kernel for prefill and decode that reads an unquantized cache by slot.
    *("--dsa-prefill-backend", "flashmla_sparse", "--dsa-decode-backend", "flashmla_sparse"),
)

SERVER_ENV = {
    # The other top-k is compiled for a GPU at its first call.
    "SGLANG_OPT_USE_TOPK_V2": "0",
    # Short prompts would take dense attention when eager, and sparse attention in a graph.
    "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",
}

DSV4_SERVER_ARGS = (
    # The host's kernels and caches for this model take no other; its pages are of 256.
    *("--attention-backend", "dsv4", "--dtype", "bfloat16", "--kv-cache-dtype", "fp8_e4m3"),
    # The window's cache as large as the other: the host's tenth would be less than a page a request.
    *("--swa-full-tokens-ratio", "1.0"),
)

DSV4_DEEPEP_ARGS = (
    # In bfloat16 DeepEP's two modes round differently, and which one a decode step takes is a matter of
    # timing: of whether another rank happens to prefill. One mode then, to compare bit for bit.
    *("--deepep-mode", "normal"),
)

DSV4_SERVER_ENV = {
    # The ends of one block and the beginning of the next are two kernels: fewer to stand in for.
    "SGLANG_OPT_FUSE_MHC_POST_PRE": "0",
    # The output projection in bfloat16: in FP8 it wants an FP8 checkpoint.
    "SGLANG_OPT_FP8_WO_A_GEMM": "0",
}

_KERNELS = "sglang_bcg_dsa.testing.dsa_kernels"
_DSV4_KERNELS = "sglang_bcg_dsa.testing.dsv4_kernels"
_DSV4_KERNELS_OF_FLASH_MLA = ("flash_mla_with_kvcache", "get_mla_metadata")
_HEAD = '"""CPU kernels under a CUDA library\'s name, for those with this folder on their path."""'

_MODULES = {
    "deep_gemm/__init__.py": (
        "fp8_mqa_logits",
        "fp8_paged_mqa_logits",
        "get_num_sms",
        "get_paged_mqa_logits_metadata",
    ),
    "sgl_kernel/__init__.py": (
        "fast_topk_transform_fused",
        "fast_topk_transform_ragged_fused",
        "fast_topk_v2",
    ),
    # 0.5.16 has FlashMLA inside sgl-kernel, 0.5.23 as a library of its own.
    "sgl_kernel/flash_mla.py": ("flash_mla_sparse_fwd", *_DSV4_KERNELS_OF_FLASH_MLA),
    "flash_mla/__init__.py": (
        "flash_mla_sparse_fwd",
        "unavailable as fused_norm_rope_attn_rope_cast",
    ),
    "flash_mla/flash_mla_interface.py": ("unavailable as FlashMLASchedMeta",),
}


def write_distribution(directory: str | Path) -> Path:
    """Write the kernel libraries into ``directory``, to go on ``PYTHONPATH``; return it."""
    for name, kernels in _MODULES.items():
        module = Path(directory) / name
        module.parent.mkdir(parents=True, exist_ok=True)
        lines = (
            f"from {_DSV4_KERNELS if kernel in _DSV4_KERNELS_OF_FLASH_MLA else _KERNELS} import {kernel}"
            for kernel in kernels
        )
        module.write_text("\n".join([_HEAD, *lines, ""]), encoding="utf-8")
    return Path(directory)


def is_on_the_path() -> bool:
    """Whether ``import deep_gemm`` gives the CPU kernels; imports nothing."""
    found = importlib.util.find_spec("deep_gemm")
    return (
        found is not None
        and found.origin is not None
        and Path(found.origin).read_bytes().startswith(_HEAD.encode())
    )
