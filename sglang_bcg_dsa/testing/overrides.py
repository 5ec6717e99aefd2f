"""Everything the CPU platform changes in SGLang and torch, as one table, and the code that
applies it.

Host functions and classes are reached through SGLang's own `HookRegistry`, its registries and
platform methods, and through torch.library, never by assignment. `HookRegistry` logs and swallows
its errors, so `verify` checks that each hook is in force, and ends the process when one is not.

Whether a row is needed on the installed host is decided by looking at the host, not at its
version; the ``hosts`` column only says where that has been seen.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from sglang_bcg_dsa.testing.settings import TapeSettings

BACKEND = "bcg_cpu"

Kind = Literal["replace", "around", "register", "kernel"]
Scope = Literal["always", "tape", "skip-break", "drop-copy"]


@dataclass(frozen=True)
class Override:
    """One change. ``make`` gives the hook of a ``replace`` or ``around``; other kinds run it."""

    target: str
    kind: Kind
    make: Callable[[TapeSettings], Any]
    why: str
    hosts: str
    remove_when: str
    scope: Scope = "always"
    needed: Callable[[], bool] = lambda: True

    @property
    def is_hook(self) -> bool:
        return self.kind in ("replace", "around")

    def applies(self, settings: TapeSettings) -> bool:
        wanted = {
            "always": True,
            "tape": settings.tape,
            "skip-break": settings.tape and settings.fault == "skip-break",
            "drop-copy": settings.tape and settings.fault == "drop-copy",
        }
        return wanted[self.scope] and self.needed()


_BCG = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


def _host(path: str) -> Any:
    return pkgutil.resolve_name(path)


def has(path: str) -> bool:
    """Whether the host has something of this name."""
    try:
        _host(path)
    except (AttributeError, ImportError):
        return False
    return True


def kernel_rows(module: str, kernel: str, targets: Sequence[str], hosts: Callable[[str], str]) -> tuple[Override, ...]:
    """Rows that put ``kernel`` of our ``module`` in the place of ``targets``, which hosts have at different places."""

    def make(_: TapeSettings) -> Any:
        return getattr(importlib.import_module(module), kernel)

    return tuple(
        Override(
            target=target,
            kind="replace",
            make=make,
            why="runs on a GPU only",
            hosts=hosts(target),
            remove_when="the host has a form of it in torch",
            needed=partial(has, target),
        )
        for target in targets
    )


# --- what is needed where -----------------------------------------------------------------------


def _platform_cannot_decline_pynccl() -> bool:
    return not hasattr(
        importlib.import_module("sglang.srt.platforms.interface"), "PlatformCapabilities"
    )


def _capture_asks_cuda_for_its_stream() -> bool:
    return not hasattr(importlib.import_module(_BCG), "get_device_module")


def _weak_references_need_a_device() -> bool:
    return '"cpu"' not in inspect.getsource(_host(f"{_BCG}._weak_ref_if_tensor"))


# --- hooks --------------------------------------------------------------------------------------


def _without_pinning(_: TapeSettings) -> Callable[..., Any]:
    def tensor(
        original: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any
    ) -> Any:
        return original(*args, **kwargs)

    return tensor


def _without_pynccl(_: TapeSettings) -> Callable[..., Any]:
    def group(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(original).bind(*args, **kwargs)
        bound.arguments["use_pynccl"] = False
        return original(*bound.args, **bound.kwargs)

    return group


def _no_triton(_: TapeSettings) -> Callable[..., Any]:
    return lambda backend: False


def _rope_without_tokens(_: TapeSettings) -> Callable[..., Any]:
    def forward_native(
        original: Callable[..., Any],
        self: Any,
        positions: Any,
        query: Any,
        key: Any,
        *rest: Any,
        **kw: Any,
    ) -> Any:
        if positions.numel() == 0:
            return query, key
        return original(self, positions, query, key, *rest, **kw)

    return forward_native


def _row_copy(_: TapeSettings) -> Callable[..., Any]:
    from sglang_bcg_dsa.testing.kernels import copy_rows

    return copy_rows


def _seeded_weights(_: TapeSettings) -> Callable[..., Any]:
    from sglang_bcg_dsa.testing.weights import seed_weights

    return seed_weights


def _cpu_stream(_: TapeSettings) -> Callable[..., Any]:
    import torch

    return lambda *args, **kwargs: torch.cpu.current_stream()


def _no_pool(_: TapeSettings) -> Callable[..., Any]:
    return lambda device_module: (0, 0)


def _strong_reference(_: TapeSettings) -> Callable[..., Any]:
    return lambda value: value


def _tape(settings: TapeSettings) -> type:
    from sglang_bcg_dsa.testing.tape import TapeGraph

    if settings.fault != "drop-copy":
        return TapeGraph

    import torch

    class TapeWithoutItsLastCopy(TapeGraph):
        """Control: the last copy recorded in a segment is lost at replay."""

        def steps_to_replay(self) -> Sequence[Any]:
            steps = list(super().steps_to_replay())
            if _fault_is_mine(settings):
                copies = [i for i, s in enumerate(steps) if s.func is torch.ops.aten.copy_.default]
                if copies:
                    del steps[copies[-1]]
            return steps

    return TapeWithoutItsLastCopy


def _segments_only(settings: TapeSettings) -> Callable[..., Any]:
    def replay(original: Callable[..., Any], graph: Any) -> Any:
        if not _fault_is_mine(settings):
            return original(graph)
        for segment in graph._segments:
            segment.replay()
        return None

    return replay


def _fault_is_mine(settings: TapeSettings) -> bool:
    import torch

    if settings.fault_rank is None:
        return True
    started = torch.distributed.is_available() and torch.distributed.is_initialized()
    return settings.fault_rank == (torch.distributed.get_rank() if started else 0)


# --- registrations ------------------------------------------------------------------------------


def _register_attention(settings: TapeSettings) -> None:
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    def make(model_runner: Any) -> Any:
        from sglang_bcg_dsa.testing.attention import CpuAttentionBackend

        # Every scheduler builds its backend after all plugins were loaded and before any capture.
        verify(settings, OVERRIDES)
        return CpuAttentionBackend(model_runner)

    register_attention_backend(BACKEND)(make)


def _register_mla_form(_: TapeSettings) -> None:
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    absorbed = handler.AttnForwardMethod.MLA
    handler.AttentionBackendRegistry.register(BACKEND, lambda attn, forward_batch: absorbed)


def _register_moe(_: TapeSettings) -> None:
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    from sglang_bcg_dsa.testing.kernels import mixture_of_experts

    def forward(self: Any, layer: Any, dispatch_output: Any) -> Any:
        config = layer.moe_runner_config
        if config.activation != "silu" or config.apply_router_weight_on_input:
            raise NotImplementedError("CPU experts are SwiGLU with weights applied to the output")
        top = dispatch_output.topk_output
        return StandardCombineInput(
            hidden_states=mixture_of_experts(
                dispatch_output.hidden_states,
                top.topk_weights,
                top.topk_ids,
                layer.w13_weight,
                layer.w2_weight,
            )
        )

    UnquantizedFusedMoEMethod.register_oot_forward(UnquantizedFusedMoEMethod, forward, "native")


# --- kernels ------------------------------------------------------------------------------------

_libraries: list[Any] = []  # a registration lives as long as its library object


def add_kernel(operator: str, kernel: Callable[..., Any]) -> None:
    """Register a CPU kernel for an operator, for as long as this process lives."""
    import torch

    namespace, name = operator.split("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(name, kernel, "CPU")
    _libraries.append(library)


def _lacks_cpu_kernel(operator: str) -> Callable[[], bool]:
    def needed() -> bool:
        import torch

        importlib.import_module("sglang.srt.distributed.parallel_state")
        importlib.import_module("sglang.srt.layers.radix_attention")
        namespace, name = operator.split("::")
        return hasattr(
            getattr(torch.ops, namespace), name
        ) and not torch._C._dispatch_has_kernel_for_dispatch_key(operator, "CPU")

    return needed


def python_op(name: str) -> Override:
    """The row for a custom operator of the host's, registered by the time the row is applied."""

    def make(_: TapeSettings) -> None:
        from sglang_bcg_dsa.testing.kernels import on_cpu_too

        add_kernel(f"sglang::{name}", on_cpu_too(f"sglang::{name}"))

    return Override(
        target=f"sglang::{name}",
        kind="kernel",
        make=make,
        why="the host registers its custom operators for one accelerator key only",
        hosts="0.5.16, 0.5.23",
        remove_when="the host registers them for the CPU",
        needed=_lacks_cpu_kernel(f"sglang::{name}"),
    )


def _invariant(name: str) -> Override:
    def make(_: TapeSettings) -> None:
        from sglang_bcg_dsa.testing import kernels

        kernel = getattr(kernels, f"invariant_{name}")
        add_kernel(f"aten::{name}", kernel)
        add_kernel(f"aten::{name}.out", kernels.into_out(kernel))

    return Override(
        target=f"aten::{name}",
        kind="kernel",
        make=make,
        why="BLAS results depend on the number of rows: on padding and the batch's make-up",
        hosts="0.5.16, 0.5.23",
        remove_when="never: it is what makes exact comparison possible",
    )


# --- the table ----------------------------------------------------------------------------------

OVERRIDES: tuple[Override, ...] = (
    Override(
        target=f"attention_registry:{BACKEND}",
        kind="register",
        make=_register_attention,
        why="the native backend's name turns graphs off, and it leaves padded rows undefined",
        hosts="0.5.16, 0.5.23",
        remove_when="never: it also verifies this table",
    ),
    Override(
        target=f"deepseek AttentionBackendRegistry:{BACKEND}",
        kind="register",
        make=_register_mla_form,
        why="MLA in its absorbed form, the one that takes any prefix; the fallback is Triton's",
        hosts="0.5.16, 0.5.23",
        remove_when="never",
    ),
    Override(
        target="UnquantizedFusedMoEMethod.register_oot_forward:native",
        kind="register",
        make=_register_moe,
        why="the host's native experts count tokens on the host, which a capture would freeze",
        hosts="0.5.16, 0.5.23",
        remove_when="the host's native experts are capturable",
    ),
    *(
        python_op(name)
        for name in (
            "inplace_all_reduce",
            "outplace_all_reduce",
            "reg_all_gather_into_tensor",
            "reg_reduce_scatter_tensor",
            "reg_all_to_all_single",
            "unified_attention_with_output",
        )
    ),
    *(_invariant(name) for name in ("mm", "addmm", "bmm")),
    Override(
        target="sglang.srt.model_loader.weight_utils.initialize_dummy_weights",
        kind="replace",
        make=_seeded_weights,
        why="the host's dummy weights vanish in rounding: wrong layers would compare equal",
        hosts="0.5.16, 0.5.23",
        remove_when="never",
    ),
    Override(
        target="torch.tensor",
        kind="around",
        make=_without_pinning,
        why="the host pins some tensors whatever the platform says; there is no driver to pin with",
        hosts="0.5.16, 0.5.23",
        remove_when="the host asks is_pin_memory_available everywhere",
    ),
    Override(
        target="sglang.kernels.ops.memory.memcpy_triton.memcpy_triton",
        kind="replace",
        make=_row_copy,
        why="Triton needs a GPU; the host's CPU form reads its bounds on the host",
        hosts="0.5.16, 0.5.23",
        remove_when="the host has a capturable CPU form and selects it for this platform",
    ),
    Override(
        target="sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        kind="around",
        make=_rope_without_tokens,
        why="an idle rank has no tokens, and the native form cannot reshape none",
        hosts="0.5.16, 0.5.23",
        remove_when="the host's native form takes zero tokens",
    ),
    Override(
        target="sglang.srt.utils.common.support_triton",
        kind="replace",
        make=_no_triton,
        why="the host asks the attention backend's name, not the platform",
        hosts="0.5.16",
        remove_when="0.5.16 is no longer supported",
        needed=_platform_cannot_decline_pynccl,
    ),
    Override(
        target="sglang.srt.distributed.parallel_state.init_model_parallel_group",
        kind="around",
        make=_without_pynccl,
        why="every group gets a NCCL communicator, which graph capture then switches on",
        hosts="0.5.16",
        remove_when="0.5.16 is no longer supported",
        needed=_platform_cannot_decline_pynccl,
    ),
    Override(
        target="torch.cuda.CUDAGraph",
        kind="replace",
        make=_tape,
        why="the host's capture builds its segments from this class",
        hosts="0.5.16, 0.5.23",
        remove_when="never",
        scope="tape",
    ),
    Override(
        target="sglang.srt.utils.common.get_current_device_stream_fast",
        kind="replace",
        make=_cpu_stream,
        why="torch's default device module is CUDA's on a CUDA wheel, driver or not",
        hosts="0.5.16, 0.5.23",
        remove_when="the host takes the platform's device module",
        scope="tape",
    ),
    Override(
        target="torch.cuda.current_stream",
        kind="replace",
        make=_cpu_stream,
        why="capture and replay ask CUDA for the current stream",
        hosts="0.5.16",
        remove_when="0.5.16 is no longer supported",
        scope="tape",
        needed=_capture_asks_cuda_for_its_stream,
    ),
    Override(
        target=f"{_BCG}._weak_ref_if_tensor",
        kind="replace",
        make=_strong_reference,
        why="weak references are a CUDA extension; a tape keeps its tensors alive anyway",
        hosts="0.5.16",
        remove_when="0.5.16 is no longer supported",
        scope="tape",
        needed=_weak_references_need_a_device,
    ),
    Override(
        target="sglang.srt.model_executor.runner_utils.pool.get_or_create_global_graph_memory_pool",
        kind="replace",
        make=_no_pool,
        why="torch.cpu has no graph memory pool",
        hosts="0.5.16, 0.5.23",
        remove_when="torch.cpu has graph_pool_handle",
        scope="tape",
    ),
    Override(
        target=f"{_BCG}.BreakableCUDAGraph.replay",
        kind="around",
        make=_segments_only,
        why="control: the breaks do not run at replay",
        hosts="0.5.16, 0.5.23",
        remove_when="never",
        scope="skip-break",
    ),
)

_originals: dict[str, object] = {}  # in a dict: HookRegistry rewrites module-level references


def apply(settings: TapeSettings, rows: Sequence[Override]) -> None:
    """Make the registrations and register the hooks, which SGLang applies after all plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for row in rows:
        if not row.applies(settings):
            continue
        made = row.make(settings)
        if row.is_hook:
            _originals[row.target] = _host(row.target)
            HookRegistry.register(row.target, made, HookType(row.kind))


def verify(settings: TapeSettings, rows: Sequence[Override]) -> None:
    """``SystemExit`` naming each hook that is not in force in this process."""
    missing = [
        row
        for row in rows
        if row.is_hook
        and row.applies(settings)
        and (row.target not in _originals or _host(row.target) is _originals[row.target])
    ]
    if missing:
        lines = "\n".join(f"  {row.target}: {row.why}" for row in missing)
        raise SystemExit(
            "sglang_bcg_dsa.testing: these overrides of the CPU platform are not in force:\n"
            f"{lines}\n"
            "See the log for the reason ('Failed to apply hooks'), and the release they were "
            "seen on in sglang_bcg_dsa/testing/overrides.py."
        )
