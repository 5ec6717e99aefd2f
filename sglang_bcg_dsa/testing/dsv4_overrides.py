"""What SGLang needs to run its own DeepSeek-V4 on a CPU, on top of `dsa_overrides`.

Contract: SGLang's model, its DSV4 attention backend, metadata, pools, compressor and indexer run as
they are, with all their break points; replaced are kernels, one row each. `prepare` is called when
such a model is about to be built, and ends the process if a row is not in force after it: no
kernel is needed earlier, and DSA modules may then be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_bcg_dsa.testing.overrides import Override, apply, has, kernel_rows, python_op, verify
from sglang_bcg_dsa.testing.settings import TapeSettings

_METADATA = "sglang.srt.layers.attention.deepseek_v4_backend.DSV4AttnMetadata"
_TOPK = 512
_JIT, _OPS = "sglang.jit_kernel.dsv4", "sglang.kernels.ops"
_DSV4 = f"{_OPS}.attention.dsv4"


def is_for(model_config: Any) -> bool:
    """Whether this is a DeepSeek-V4."""
    return any(name.startswith("DeepseekV4") for name in model_config.hf_config.architectures)


def prepare(settings: TapeSettings) -> None:
    """Put the rows in force."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    apply(settings, ROWS)
    HookRegistry.apply_hooks()
    verify(settings, ROWS)


def whole_heads(original: Callable[..., Any], model_config: Any, *args: Any, **kwargs: Any) -> Any:
    """Leave this model's one key head: each rank has it. Other models go to the host."""
    return model_config if is_for(model_config) else original(model_config, *args, **kwargs)


def general_rope(original: Callable[..., Any], *args: Any, rope_scaling: Any = None, device: Any = None, **kwargs: Any) -> Any:
    """The general rotary embedding for layers without scaling: the host's for a CPU has scaled ones only."""
    return original(*args, rope_scaling=rope_scaling, device=device if rope_scaling else None, **kwargs)


def any_topk(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the host make its tables for a top-k that its kernels have, then cut them to the model's."""
    name = "index_topk" if hasattr(self, "index_topk") else "c4_sparse_topk"
    wanted = getattr(self, name)
    setattr(self, name, _TOPK)
    original(self, *args, **kwargs)
    setattr(self, name, wanted)
    self.c4_sparse_topk_lengths = self.c4_sparse_topk_lengths.clamp(max=wanted)
    for name in ("c4_sparse_page_indices", "c4_sparse_raw_indices"):
        table = getattr(self, name)
        setattr(self, name, None if table is None else table[:, :wanted].contiguous())


def _plan_of(original: Callable[..., Any]) -> Any:
    """The named tuple whose static method this is."""
    module = importlib.import_module(original.__module__)
    return getattr(module, original.__qualname__.split(".")[0])


def prefill_plan(
    original: Callable[..., Any],
    *,
    compress_ratio: int,
    num_q_tokens: int,
    use_cuda_graph: bool = False,
    use_req_ring: bool = False,
    **tensors: Any,
) -> Any:
    """The compressor's plan for a prefill; on a GPU the host pins a buffer for it."""
    from sglang_bcg_dsa.testing.dsv4_kernels import prefill_plans

    _refuse_ring(use_req_ring)
    plans = prefill_plans(compress_ratio, num_q_tokens=num_q_tokens, padded=use_cuda_graph, **tensors)
    return _plan_of(original)(compress_ratio, *plans)


def decode_plan(original: Callable[..., Any], *, compress_ratio: int, use_req_ring: bool = False, **tensors: Any) -> Any:
    """The compressor's plan for a decode."""
    from sglang_bcg_dsa.testing.dsv4_kernels import decode_plans

    _refuse_ring(use_req_ring)
    return _plan_of(original)(compress_ratio, decode_plans(compress_ratio, **tensors))


def experts_in_torch(
    original: Callable[..., Any],
    *,
    packed_out: None = None,
    sqrtsoftplus_log1p: bool = False,
    router_logits_partials: None = None,
    num_shared_append: int = 0,
    **given: Any,
) -> Any:
    """The host's choice of experts in torch, where it takes its JIT kernel."""
    if packed_out is not None or sqrtsoftplus_log1p or router_logits_partials is not None or num_shared_append:
        raise NotImplementedError("the host's choice of experts in torch gives plain ids and weights")
    return importlib.import_module(original.__module__).biased_topk_impl(**given)


def _register_topk(_: TapeSettings) -> None:
    topk = importlib.import_module("sglang.srt.layers.moe.topk").TopK
    topk.register_oot_forward(topk, topk.forward_cuda, "native")


def _refuse_ring(wanted: bool) -> None:
    if wanted:
        raise NotImplementedError("CPU plans find the state of ratio 4 by cache slot, not by request")


def _kernel(kernel: str, *targets: str) -> tuple[Override, ...]:
    module = "sglang_bcg_dsa.testing.dsv4_kernels"
    return kernel_rows(module, kernel, targets, lambda target: "0.5.16" if _JIT in target else "0.5.16, 0.5.23")


def _plan(name: str, hook: Callable[..., Any]) -> tuple[Override, ...]:
    return tuple(
        Override(
            target=target,
            kind="around",
            make=lambda _: hook,
            why="made on a GPU, from a pinned buffer",
            hosts="0.5.16, 0.5.23",
            remove_when="the host has a form of it in torch",
            needed=partial(has, target),
        )
        for target in (f"{_JIT}.compress.{name}.generate", f"{_DSV4}.compress.{name}.generate")
    )


IN_SCHEDULERS = (
    Override(
        target="sglang.srt.configs.update_config.adjust_config_with_unaligned_cpu_tp",
        kind="around",
        make=lambda _: whole_heads,
        why="with more than one rank the host pads key heads for its CPU kernels, DP attention or not",
        hosts="0.5.16, 0.5.23",
        remove_when="the host pads for attention's share only",
    ),
)

ROWS = (
    *(
        row
        for name in (
            "fused_q_norm_rope",
            "fused_rope_inplace",
            "fused_k_norm_rope_flashmla",
            "fused_q_indexer_rope_hadamard_quant",
        )
        for row in _kernel(name, f"{_JIT}.elementwise.{name}", f"{_DSV4}.norm_rope.{name}")
    ),
    *(
        row
        for module, name in (
            ("compress", "compress_forward"),
            ("compress", "compress_norm_rope_store"),
            ("attn", "get_paged_mqa_logits_metadata"),
            ("topk", "plan_topk_v2"),
        )
        for row in _kernel(name, f"{_JIT}.{module}.{name}", f"{_DSV4}.{module}.{name}")
    ),
    *_plan("CompressorPrefillPlan", prefill_plan),
    *_plan("CompressorDecodePlan", decode_plan),
    *_kernel("topk_transform_512", f"{_JIT}.topk.topk_transform_512", f"{_DSV4}.topk.topk_transform_paged"),
    *_kernel(
        "topk_transform_512_v2",
        f"{_JIT}.topk.topk_transform_512_v2",
        f"{_DSV4}.topk.topk_transform_paged_v2",
    ),
    *_kernel("hash_topk", f"{_JIT}.moe.hash_topk", f"{_OPS}.moe.dsv4.hash_topk"),
    *_kernel("init_compression_metadata", f"{_DSV4}.metadata_kernel.init_compression_metadata"),
    *_kernel(
        "dequantize_k_cache_paged",
        f"{_DSV4}.dequant_k_cache.dequantize_k_cache_paged",
        f"{_DSV4}.dequant_k_cache.dequantize_k_cache_paged_dsv4",
    ),
    *(
        row
        for name in ("build_swa_token_ids", "combine_topk_swa_indices")
        for row in _kernel(
            name,
            f"sglang.srt.layers.attention.dsv4.sparse_prefill_utils.{name}",
            f"{_DSV4}.sparse_prefill_kernels.{name}",
        )
    ),
    *_kernel("flash_mla_sparse_fwd", "sgl_kernel.flash_mla.flash_mla_sparse_fwd"),
    *(
        row
        for name in ("flash_mla_sparse_fwd", "flash_mla_with_kvcache", "get_mla_metadata")
        for row in _kernel(name, f"{_OPS}.attention.flash_mla_interface.{name}")
    ),
    *_kernel("mhc_pre", f"{_OPS}.layernorm.mhc.mhc_pre"),
    *_kernel("mhc_post", f"{_OPS}.layernorm.mhc.mhc_post"),
    *_kernel("fused_hc_head", f"{_OPS}.layernorm.mhc_head.fused_hc_head"),
    Override(
        target="sglang.srt.layers.rotary_embedding.factory.get_rope_wrapper",
        kind="around",
        make=lambda _: general_rope,
        why="layers that compress nothing have no scaling, which the host's form for a CPU demands",
        hosts="0.5.23",
        remove_when="it does not",
    ),
    Override(
        target="sglang.srt.platforms.interface.reject_out_of_tree_path",
        kind="replace",
        make=lambda _: lambda *args, **kwargs: None,
        why="the host refuses to build its own pool on another's platform, where CUDA's may not fit; here it does",
        hosts="0.5.23",
        remove_when="the host lets a platform choose this pool",
        needed=partial(has, "sglang.srt.platforms.interface.reject_out_of_tree_path"),
    ),
    Override(
        target="TopK.register_oot_forward:native",
        kind="register",
        make=_register_topk,
        why="the host's native choice among ungrouped experts takes no padded rows",
        hosts="0.5.16, 0.5.23",
        remove_when="it does",
    ),
    Override(
        target="sglang.kernels.ops.moe.fill_padded_rows._can_fuse_padded_region",
        kind="replace",
        make=lambda _: lambda x: False,
        why="Triton needs a GPU; the host has the same in torch",
        hosts="0.5.16, 0.5.23",
        remove_when="the host takes its torch form on this platform",
    ),
    Override(
        target="sglang.srt.layers.moe.topk.biased_topk_jit_kernel_impl",
        kind="around",
        make=lambda _: experts_in_torch,
        why="compiled for a GPU at its first call; the host has the same in torch",
        hosts="0.5.16, 0.5.23",
        remove_when="the host takes its torch form on this platform",
    ),
    Override(
        target=f"{_METADATA}.init_flashmla_related",
        kind="around",
        make=lambda _: any_topk,
        why="the host's kernels choose 512 or 1024, and it demands that; a small model would not have to choose",
        hosts="0.5.16, 0.5.23",
        remove_when="never",
    ),
    python_op("deepseek_v4_attention_with_output"),
)
