"""What SGLang needs to run its DeepEP path on a CPU, on top of the ``deep_ep`` stand-in.

Contract: after `register` and SGLang's ``HookRegistry.apply_hooks``, ``--moe-a2a-backend deepep``
works on the CPU platform with the host's own ``DeepEPMoE`` and dispatcher classes; only what cannot
exist without a GPU is answered here, one row of `OVERRIDES` each. The first use of DeepEP in a
process ends it if a row is not in force. Nothing happens unless `register` is called.

Start the server with `deep_ep_folder.SERVER_ARGS`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils import _python_dispatch

from sglang_bcg_dsa.testing import deep_ep_gloo
from sglang_bcg_dsa.testing.overrides import Kind, Override
from sglang_bcg_dsa.testing.settings import TapeSettings
from sglang_bcg_dsa.testing.tape import TapeGraph

DEEPEP = "sglang.srt.layers.moe.token_dispatcher.deepep"


def buffer_without_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The host's own buffer factory, told about a device with as many SMs as DeepEP takes.

    That count only decides whether the factory warns that DeepEP was given few SMs.
    """
    verify()
    properties = SimpleNamespace(multi_processor_count=deep_ep_gloo.Buffer.num_sms)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device=None: properties):
        return original(*args, **kwargs)


def no_fabric() -> bool:
    """No NVLink fabric; the host asks the current CUDA device, and there is none."""
    return False


def combine_input_as_is(
    dispatcher: Any,
    hidden_states: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
) -> tuple[torch.Tensor, deep_ep_gloo.EventOverlap | None]:
    """The experts' rows are ready for combine, as they are after the host's DeepGEMM experts."""
    event = deep_ep_gloo.Buffer.capture() if dispatcher.async_finish else None
    return hidden_states, event


def experts_in_torch(original: Callable[..., Any], layer: Any, dispatch_output: Any) -> Any:
    """Run unquantized experts on what was dispatched; everything else stays with the host."""
    if layer.deprecate_flag or layer.quant_config is not None:
        return original(layer, dispatch_output)
    from sglang.srt.layers.moe.token_dispatcher import DispatchOutputChecker
    from sglang.srt.layers.moe.token_dispatcher.deepep import (
        DeepEPLLCombineInput,
        DeepEPNormalCombineInput,
    )

    _check_plain_silu(layer.moe_runner_config)
    out, weights = dispatch_output, (layer.w13_weight, layer.w2_weight)
    if DispatchOutputChecker.format_is_deepep_normal(out):
        rows = normal_experts(out.hidden_states, out.topk_ids, out.topk_weights, *weights)
        return DeepEPNormalCombineInput(rows, out.topk_ids, out.topk_weights)
    if DispatchOutputChecker.format_is_deepep_ll(out):
        slots = low_latency_experts(out.hidden_states, out.masked_m, *weights)
        return DeepEPLLCombineInput(slots, out.topk_ids, out.topk_weights)
    return original(layer, dispatch_output)


def normal_experts(
    x: torch.Tensor,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
) -> torch.Tensor:
    """For each row, the weighted sum of the local experts it chose (-1: none); combine only adds.

    Rounded like `low_latency_experts` and its combine: float32 models do not show which mode ran.
    """
    total = torch.zeros(x.shape, dtype=torch.float32)
    for expert in range(w13.shape[0]):
        row, choice = (topk_ids == expert).nonzero(as_tuple=True)
        if row.numel():
            made = _mlp(x[row], w13[expert], w2[expert]).float()
            total.index_add_(0, row, made * topk_weights[row, choice].unsqueeze(1))
    return total.to(x.dtype)


def low_latency_experts(
    slots: torch.Tensor, used: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor
) -> torch.Tensor:
    """Each expert over its used slots; unused slots are returned as they came; combine weighs."""
    out = slots.clone()
    for expert, count in enumerate(used.tolist()):
        out[expert, :count] = _mlp(slots[expert, :count], w13[expert], w2[expert]).to(slots.dtype)
    return out


def _mlp(x: torch.Tensor, w13: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
    """SwiGLU in float64: how many rows share a product must not show in a float32 result."""
    gate, up = (x.double() @ w13.double().t()).chunk(2, dim=-1)
    return (functional.silu(gate) * up) @ w2.double().t()


def _check_plain_silu(config: Any) -> None:
    """Refuse expert forms that `_mlp` does not compute, rather than compute another one."""
    special = ("apply_router_weight_on_input", "gemm1_alpha", "gemm1_clamp_limit", "swiglu_limit")
    asked = [name for name in special if getattr(config, name, None)]
    if config.activation != "silu" or not getattr(config, "is_gated", True) or asked:
        raise NotImplementedError(
            f"CPU experts are plain SwiGLU; this layer wants {config.activation!r} with {asked}"
        )


def report_counters(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Put the counters into the scheduler's state, thereby into ``/server_info``, per DP rank."""
    result = original(*args, **kwargs)
    result.internal_state["deep_ep_gloo"] = deep_ep_gloo.counters.as_dict()
    return result


def _row(target: str, kind: Kind, hook: Callable[..., Any], why: str, remove_when: str) -> Override:
    def make(_: TapeSettings) -> Callable[..., Any]:
        return hook

    return Override(target, kind, make, why, hosts="0.5.16, 0.5.23", remove_when=remove_when)


OVERRIDES: tuple[Override, ...] = (
    _row(
        f"{DEEPEP}.DeepEPBuffer.get_deepep_buffer",
        "around",
        buffer_without_device,
        why="asks the CUDA device for its SM count, to decide on a warning",
        remove_when="never: it also verifies this table",
    ),
    _row(
        f"{DEEPEP}._is_mnnvl_fabric_supported",
        "replace",
        no_fabric,
        why="asks the current CUDA device for fabric handles whenever flashinfer is installed",
        remove_when="the host skips the question when there is no CUDA device",
    ),
    _row(
        f"{DEEPEP}._DeepEPDispatcherImplNormal.combine_a",
        "replace",
        combine_input_as_is,
        why="raises NotImplementedError where DeepGEMM is not available",
        remove_when="the host's normal-mode combine takes rows of any expert implementation",
    ),
    _row(
        "sglang.srt.layers.moe.ep_moe.layer.DeepEPMoE.run_moe_core",
        "around",
        experts_in_torch,
        why="no unquantized experts for normal mode, and only CUDA kernels for the others",
        remove_when="the host has torch-native experts for DeepEP's layouts",
    ),
    _row(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "around",
        report_counters,
        why="a test outside the process must see that tokens crossed ranks",
        remove_when="never",
    ),
)

_originals: dict[str, object] = {}  # in a dict: HookRegistry rewrites module-level references


def wanted() -> bool:
    """Whether ``import deep_ep`` gives the stand-in: its folder on the path asks for all this."""
    try:
        import deep_ep
    except ImportError:
        return False
    return deep_ep.Buffer is deep_ep_gloo.Buffer


def tape_is_recording() -> bool:
    """Whether this thread is inside a segment that a tape captures."""
    modes = _python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, TapeGraph) for mode in modes)


def register(capturing: Callable[[], bool] = tape_is_recording) -> None:
    """Register every row with SGLang's hook registry; for a plugin to call, in scheduler processes.

    While ``capturing`` says so, the stand-in refuses to communicate. ``SystemExit`` where
    ``deep_ep`` is not the stand-in or the host lacks a target: SGLang swallows a plugin's other
    exceptions and would go on without.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if not wanted():
        raise SystemExit(
            "deep_ep is not the gloo stand-in: put the folder made by "
            "sglang_bcg_dsa.testing.deep_ep_folder.write_distribution on PYTHONPATH"
        )
    settings = TapeSettings.from_env()
    for row in OVERRIDES:
        try:
            _originals[row.target] = pkgutil.resolve_name(row.target)
        except (AttributeError, ImportError) as error:
            raise SystemExit(
                f"DeepEP on CPU does not fit this SGLang (seen: {row.hosts}): {row.target}: {error}"
            ) from error
        HookRegistry.register(row.target, row.make(settings), HookType(row.kind))
    deep_ep_gloo.capturing = capturing


def verify() -> None:
    """``SystemExit`` naming each row that is not in force in this process."""
    inert = [
        f"  {row.target}: {row.why}"
        for row in OVERRIDES
        if row.target not in _originals
        or pkgutil.resolve_name(row.target) == _originals[row.target]
    ]
    if inert:
        raise SystemExit(
            "sglang_bcg_dsa.testing: these overrides for DeepEP on CPU are not in force:\n"
            + "\n".join(inert)
        )
