"""DeepEP MoE whose dispatch, experts and combine are one break.

Contract: in a breakable region the output is allocated inside the captured segment and the break
only writes it. The body runs the host's own ``forward_impl`` in NORMAL mode, whatever the live
batch or the runner set; the mode is restored whatever happens. While capturing a stub stands in:
NORMAL dispatch waits for counts from all ranks, and an attempt to capture it spins for good
(measured on H200). Outside a breakable region nothing differs from the host.

The subclass carries the host's class name, because the host looks quantization schemes up by it,
and is a true subclass, because models ask ``isinstance``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch

from sglang_bcg_dsa.breaks import Break, replaying
from sglang_bcg_dsa.engine import current_capture, in_breakable_region
from sglang_bcg_dsa.errors import CaptureError


def with_break(base: type, call: Callable[..., None], refusal: Callable[[int, Any], str | None]) -> type:
    """A subclass of the host's DeepEPMoE that calls ``call`` as its break.

    ``call(output, layer, hidden_states, topk_weights, topk_ids, router_logits)``; shapes are the
    host's: hidden states and output ``[tokens, hidden]``, top-k ``[tokens, k]``, router logits
    ``[tokens, experts]`` or None. ``refusal(tokens, topk_output)`` says what would go wrong, or None.
    """

    class DeepEPMoE(base):  # type: ignore[misc]
        """The host's DeepEPMoE; dispatch, experts and combine as one break in breakable regions."""

        def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
            if not in_breakable_region():
                result: torch.Tensor = super().forward(hidden_states, topk_output)
                return result
            why = refusal(hidden_states.shape[0], topk_output)
            if why is not None:
                raise CaptureError(f"layer {self.layer_id}: {why}")
            output = torch.empty_like(hidden_states)
            call(output, self, hidden_states, topk_output.topk_weights, topk_output.topk_ids, topk_output.router_logits)
            return output

    DeepEPMoE.__qualname__ = base.__qualname__
    return DeepEPMoE


BUCKET_MULTIPLE = 8
"""DeepEP's dispatch can hang on prefill buckets that are no multiple of it (SGLang's own note)."""


def refusals(overlap: Callable[[], bool], attention_tp: Callable[[], int]) -> Callable[[int, Any], str | None]:
    """What a captured MoE break cannot do right. Checked at warm-up, before the first capture."""

    def refusal(tokens: int, topk_output: Any) -> str | None:
        if not hasattr(topk_output, "topk_ids"):
            return (
                f"top-k output is {type(topk_output).__name__}; a captured MoE break needs plain weights, ids and router "
                "logits. Use a MoE runner that takes the standard format, or --disable-prefill-cuda-graph"
            )
        if overlap():
            return (
                "single-batch overlap runs the shared experts in a hook of the dispatch, which no captured graph "
                "contains: they would be missing. Drop --enable-single-batch-overlap, or pass --disable-prefill-cuda-graph"
            )
        bucket = tokens * attention_tp()
        if bucket % BUCKET_MULTIPLE:
            return (
                f"prefill bucket {bucket} is no multiple of {BUCKET_MULTIPLE}, on which DeepEP can hang. Pass "
                f"--cuda-graph-bs-prefill with multiples of {BUCKET_MULTIPLE}"
            )
        return None

    return refusal


def make_break(
    make_topk: Callable[..., Any],
    get_extend: Callable[[], bool],
    set_extend: Callable[[bool], None],
    get_recorder: Callable[[], Any],
    barrier: Callable[[], None],
) -> Break:
    """The with_output break: body, stub and barrier."""

    def dispatch_experts_combine(
        output: torch.Tensor,
        layer: Any,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        router_logits: torch.Tensor | None,
    ) -> None:
        live = get_extend()
        # The prefill runner clears the flag around its own forwards; without it "auto" would pick
        # LOW_LATENCY at warm-up, whose token budget a prefill bucket exceeds.
        set_extend(True)
        # The host tells its expert recorder the layer in Python around this call, which a replay skips.
        layer_known = get_recorder().with_current_layer(layer.layer_id) if replaying() else nullcontext()
        try:
            with layer_known:
                output.copy_(layer.forward_impl(hidden_states, make_topk(topk_weights, topk_ids, router_logits)))
        finally:
            set_extend(live)

    def nothing(output: torch.Tensor, *inputs: Any) -> None:
        output.zero_()

    return Break(dispatch_experts_combine, stub=nothing, barrier=barrier, current_capture=current_capture)


def named_barrier(get_group: Callable[[], Any], seconds: float) -> Callable[[], None]:
    """A barrier of the tensor-parallel group that names the ranks that did not come.

    gloo's monitored barrier: it runs on the CPU group, as the host's own barrier does, at capture
    only. Raises RuntimeError with the missing ranks after ``seconds``.
    """

    def barrier() -> None:
        group = get_group()
        if group.world_size > 1:
            torch.distributed.monitored_barrier(
                group.cpu_group, timeout=timedelta(seconds=seconds), wait_all_ranks=True
            )

    return barrier


def single_stream(original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
    """Run the host's ``forward_deepep`` without its alternate stream in breakable regions.

    It forks the shared experts before the MoE call and waits for their event after it. With the
    break in between, the event would be recorded in one capture and waited for in another, which
    CUDA refuses. Nothing overlaps across a break anyway.
    """
    if not in_breakable_region() or layer.alt_stream is None:
        return original(layer, *args, **kwargs)
    stream, layer.alt_stream = layer.alt_stream, None
    try:
        return original(layer, *args, **kwargs)
    finally:
        layer.alt_stream = stream
