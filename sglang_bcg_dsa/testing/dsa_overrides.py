"""What SGLang needs to run its own DSA on a CPU, on top of the stand-ins for its kernel libraries.

Contract: with the folder of `dsa_folder` on the path, SGLang's DSA backend, indexer, pool and model
run as they are, with all their break points; replaced are kernels, one row each. The first model
that is built ends the process if a row is not in force.

The DSA modules decide at import whether they run on CUDA, so they must not be imported before
hooks are applied: a plugin that subclasses their classes does so when the backend is made.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from sglang_bcg_dsa.testing import dsv4_overrides
from sglang_bcg_dsa.testing.overrides import (
    OVERRIDES,
    Kind,
    Override,
    add_kernel,
    apply,
    kernel_rows,
    python_op,
    verify,
)
from sglang_bcg_dsa.testing.settings import TapeSettings

_BOTH = "0.5.16, 0.5.23"
_BACKEND = "sglang.srt.layers.attention.dsa_backend"
_INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer"
_DSV4 = ("sglang.srt.layers.attention.dsv4.", "sglang.srt.layers.attention.deepseek_v4_backend")
_ASKERS_OF_CUDA = ("sglang.srt.layers.attention.dsa.", _BACKEND, *_DSV4)
_ASKERS_OF_CAPABILITY = ("sglang.srt.server_args", "sglang.srt.arg_groups.", _BACKEND, *_DSV4)


def _asker() -> str:
    """The module whose code called the hooked function."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in (__name__, "sglang.srt.plugins.hook_registry"):
        assert frame.f_back is not None
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


def is_cuda(original: Callable[[], bool]) -> bool:
    """Yes for the DSA modules, whose other branches are for other devices; else the host's answer."""
    return _asker().startswith(_ASKERS_OF_CUDA) or original()


def capability(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Hopper's for those who choose among DSA kernels; else torch's answer, which may be an error."""
    return (9, 0) if _asker().startswith(_ASKERS_OF_CAPABILITY) else original(*args, **kwargs)


def build_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Check the rows, and apply those that need DSA modules, now that these may be imported."""
    settings = TapeSettings.from_env()
    verify(settings, (*OVERRIDES, *IN_EVERY_PROCESS, *IN_SCHEDULERS))
    importlib.import_module("sglang.srt.models.deepseek_v2")
    if not importlib.import_module(_INDEXER)._is_cuda:
        raise SystemExit(
            f"sglang_bcg_dsa.testing: {_INDEXER} was imported before SGLang applied hooks, and so "
            "decided that this is no CUDA; a plugin must import DSA modules no earlier than its "
            "backend is made"
        )
    apply(settings, WITH_THE_MODEL)
    if dsv4_overrides.is_for(args[0]):
        dsv4_overrides.prepare(settings)
    return original(*args, **kwargs)


def _register_indexer(_: TapeSettings) -> None:
    indexer = importlib.import_module(_INDEXER).Indexer
    indexer.register_oot_forward(indexer, indexer.forward_cuda, "native")


def rope(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """The general native form, which takes keys without a dimension of heads."""
    base = importlib.import_module("sglang.srt.layers.rotary_embedding.base").RotaryEmbedding
    return base.forward_native(self, *args, **kwargs)


def with_its_slots(
    original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Run a batch; meanwhile the kernels know which cache slots are its own."""
    from sglang_bcg_dsa.testing.dsa_kernels import batch_slots

    new = forward_batch.out_cache_loc
    table = runner.req_to_token_pool.req_to_token
    requests = zip(forward_batch.req_pool_indices, forward_batch.seq_lens.tolist(), strict=True)
    with batch_slots(
        written=() if new is None else new.tolist(),
        read=(slot for row, length in requests for slot in table[row, :length].tolist()),
    ):
        return original(runner, forward_batch, *args, **kwargs)


def _row(target: str, kind: Kind, hook: Callable[..., Any], why: str, remove_when: str) -> Override:
    return Override(target, kind, lambda _: hook, why, _BOTH, remove_when)


def _kernel(kernel: str, *targets: str) -> tuple[Override, ...]:
    return kernel_rows("sglang_bcg_dsa.testing.dsa_kernels", kernel, targets, lambda _: _BOTH)


def _add_mm_to(_: TapeSettings) -> None:
    from sglang_bcg_dsa.testing.dsa_kernels import mm_to

    add_kernel("aten::mm.dtype", mm_to)


IN_EVERY_PROCESS = (
    _row(
        "torch.cuda.get_device_capability",
        "around",
        capability,
        why="argument resolution and the DSA backend ask CUDA which kernels to choose from",
        remove_when="the host asks its platform",
    ),
)

IN_SCHEDULERS = (
    _row(
        # Hooks are applied in the order of their names, and this one has to come before any that
        # makes a DSA module be imported. Through whichever module it is named, all are reached.
        "sglang.srt.distributed.parallel_state.is_cuda",
        "around",
        is_cuda,
        why="DSA modules take their CUDA branches, at import and later, only if told so",
        remove_when="the host lets an out-of-tree platform choose the DSA branches",
    ),
    _row(
        "sglang.srt.model_loader.loader._initialize_model",
        "around",
        build_model,
        why="some rows can be applied only when DSA modules may be imported",
        remove_when="never: it also verifies the other rows",
    ),
    _row(
        "sglang.srt.model_executor.model_runner.ModelRunner.forward",
        "around",
        with_its_slots,
        why="control: no row may write or read the cache of a request that is not in its batch",
        remove_when="never",
    ),
    _row(
        "sglang.srt.layers.rotary_embedding.rope_variant.DeepseekScalingRotaryEmbedding.forward_native",
        "around",
        rope,
        why="the scaled native form gives a wrong shape for the indexer's keys, which have no heads",
        remove_when="the host's native form takes what its CUDA form takes",
    ),
    Override(
        target="aten::mm.dtype",
        kind="kernel",
        make=_add_mm_to,
        why="the indexer's head gates are a product with a wider result; torch has it on CUDA",
        hosts=_BOTH,
        remove_when="torch has it on the CPU, and its rows do not depend on their number",
    ),
    *_kernel(
        "act_quant",
        "sglang.kernels.ops.attention.dsa.triton_kernel.act_quant",
        "sglang.kernels.ops.quantization.act_quant_triton.act_quant",
    ),
    *_kernel(
        "hadamard_transform",
        "sglang.jit_kernel.hadamard.hadamard_transform",
        "sglang.kernels.ops.quantization.hadamard.hadamard_transform",
    ),
    *_kernel(
        "no_fused_store",
        "sglang.jit_kernel.fused_store_index_cache.can_use_dsa_fused_store",
        "sglang.kernels.ops.kvcache.dsa_fused_store_index_cache.can_use_dsa_fused_store",
    ),
    *_kernel(
        "set_index_k",
        "sglang.kernels.ops.attention.dsa.index_buf_accessor._set_k_and_s_triton",
        "sglang.kernels.ops.kvcache.dsa_index_k_cache._set_k_and_s_triton",
    ),
    *_kernel(
        "get_index_k",
        "sglang.kernels.ops.attention.dsa.index_buf_accessor._get_k_and_s_triton",
        "sglang.kernels.ops.kvcache.dsa_index_k_cache._get_k_and_s_triton",
    ),
    *_kernel(
        "set_mla_kv_buffer",
        "sglang.kernels.ops.kvcache.mla_buffer.set_mla_kv_buffer_triton",
    ),
    *dsv4_overrides.IN_SCHEDULERS,
)

WITH_THE_MODEL = (
    Override(
        target="Indexer.register_oot_forward:native",
        kind="register",
        make=_register_indexer,
        why="an out-of-tree platform gets the indexer's native forward, and there is none",
        hosts=_BOTH,
        remove_when="the host has one",
    ),
    *(python_op(n) for n in ("pcg_dsa_indexer_prefill_split", "mla_bmm_then_unified_attention")),
)
