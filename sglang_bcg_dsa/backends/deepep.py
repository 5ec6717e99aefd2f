"""DeepEP MoE whose dispatch, experts and combine are one break.

Contract: in a breakable region the output is allocated inside the captured segment and the break
only writes it. The body runs the host's own ``forward_impl`` in NORMAL mode, whatever the live
batch or the runner set; the mode is restored whatever happens. While capturing a stub stands in:
NORMAL dispatch waits for counts from all ranks, and an attempt to capture it spins for good
(measured on H200). Outside a breakable region nothing differs from the host.

Whatever else calls the dispatcher while a segment is captured is refused (:func:`only_in_breaks`).

The subclass carries the host's class name, because the host looks quantization schemes up by it,
and is a true subclass, because models ask ``isinstance``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch

from sglang_bcg_dsa.breaks import Break, replaying
from sglang_bcg_dsa.buckets import deepep_multiple
from sglang_bcg_dsa.engine import current_capture, in_breakable_region
from sglang_bcg_dsa.errors import CaptureError
from sglang_bcg_dsa.exchange import Store
from sglang_bcg_dsa.rollcall import group


def with_break(
    base: type,
    call: Callable[..., None],
    refusal: Callable[[int, Any], str | None],
    counted: Callable[[], bool],
    layers: MutableMapping[Any, int],
) -> type:
    """A subclass of the host's DeepEPMoE that calls ``call`` as its break.

    ``call(output, layer, hidden_states, topk_weights, topk_ids, router_logits, counted)``; shapes
    are the host's: hidden states and output ``[tokens, hidden]``, top-k ``[tokens, k]``, router
    logits ``[tokens, experts]`` or None. ``refusal(tokens, topk_output)`` says what would go wrong,
    or None. ``counted()``: whether the host's expert recorder counts this call. ``layers`` is told
    the layer of each dispatcher.
    """

    class DeepEPMoE(base):  # type: ignore[misc]
        """The host's DeepEPMoE; dispatch, experts and combine as one break in breakable regions."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            layers[self.dispatcher] = self.layer_id

        def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
            if not in_breakable_region():
                result: torch.Tensor = super().forward(hidden_states, topk_output)
                return result
            why = refusal(hidden_states.shape[0], topk_output)
            if why is not None:
                raise CaptureError(f"layer {self.layer_id}: {why}")
            output = torch.empty_like(hidden_states)
            top = topk_output
            call(output, self, hidden_states, top.topk_weights, top.topk_ids, top.router_logits, counted())
            return output

    DeepEPMoE.__qualname__ = base.__qualname__
    return DeepEPMoE


def refusals(
    overlap: Callable[[], bool], attention_tp: Callable[[], int], server_args: Callable[[], Any]
) -> Callable[[int, Any], str | None]:
    """What captured MoE layers cannot do right. Checked at warm-up, before the first capture.

    Rebalancing experts is no such thing: the host writes new maps and weights into the tensors that
    the segments read. Its two exceptions, which put new tensors in their place, are.
    """

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
        args = server_args()
        if args.enable_eplb and args.ep_dispatch_algorithm == "lp":
            return (
                "rebalancing replaces the solvers of --ep-dispatch-algorithm lp, and captured graphs would go on with "
                "the old ones: tokens would go to the wrong experts. Use static or dynamic, drop --enable-eplb, or pass "
                "--disable-prefill-cuda-graph"
            )
        if args.elastic_ep_backend is not None:
            return (
                "elastic expert parallelism replaces the map of experts when ranks join, and captured graphs would go "
                "on with the old one. Drop --elastic-ep-backend, or pass --disable-prefill-cuda-graph"
            )
        ranks = attention_tp()
        bucket, multiple = tokens * ranks, deepep_multiple(ranks)
        if bucket % multiple:
            return (
                f"prefill bucket {bucket} is no multiple of {multiple}, on which DeepEP can hang. Pass "
                f"--cuda-graph-bs-prefill with multiples of {multiple}"
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
        counted: bool,
    ) -> None:
        live = get_extend()
        # The prefill runner clears the flag around its own forwards; without it "auto" would pick
        # LOW_LATENCY at warm-up, whose token budget a prefill bucket exceeds.
        set_extend(True)
        # The host tells its expert recorder the layer, or to leave a draft model's out, in Python around
        # this call, which a replay skips.
        told: AbstractContextManager[Any] = nullcontext()
        if replaying():
            recorder = get_recorder()
            told = recorder.with_current_layer(layer.layer_id) if counted else recorder.disable_this_region()
        try:
            with told:
                output.copy_(layer.forward_impl(hidden_states, make_topk(topk_weights, topk_ids, router_logits)))
        finally:
            set_extend(live)

    def nothing(output: torch.Tensor, *inputs: Any) -> None:
        output.zero_()

    return Break(dispatch_experts_combine, stub=nothing, barrier=barrier, current_capture=current_capture)


_MARK = "sglang_bcg_dsa/break"


def named_barrier(get_group: Callable[[], Any], seconds: float) -> Callable[[], None]:
    """A barrier of the tensor-parallel group that names the ranks that did not come.

    It runs on the CPU group, as the host's own barrier does, at capture only. Each rank first marks
    in the world's key-value store how far it is. Raises CaptureError with the absent ranks after
    ``seconds``, or at once when a rank has ended. torch's monitored barrier would not do: it limits
    the first rank's wait only, the others wait the group's own time-out for that rank.
    """
    numbers = itertools.count(1)

    def barrier() -> None:
        tp = get_group()
        if tp.world_size == 1:
            return
        number, (store, rank, _) = next(numbers), group()
        store.set(f"{_MARK}/{rank}", str(number))
        try:
            torch.distributed.barrier(group=tp.cpu_group, async_op=True).wait(timedelta(seconds=seconds))
        except RuntimeError as error:
            raise CaptureError(
                f"rank {rank} waited at MoE break {number} since start, while capturing: "
                f"{_absent(store, tp.ranks, number)} ({error}; at most {seconds:g} s, [moe] barrier_seconds). "
                "Look for the first error there; if there is none, it may still compile kernels"
            ) from error

    return barrier


def _absent(store: Store, ranks: Sequence[int], number: int) -> str:
    """Who has not marked barrier ``number``, as a clause."""
    try:
        keys = {rank: f"{_MARK}/{rank}" for rank in ranks}
        behind = [r for r, key in keys.items() if not store.check([key]) or int(store.get(key)) < number]
    except Exception as error:  # by release: DistStoreError, DistNetworkError, RuntimeError
        return f"rank 0 has ended, and with it the marks of who came ({type(error).__name__})"
    return f"rank {', '.join(map(str, behind))} did not come" if behind else "all came, but one has ended since"


def only_in_breaks(layers: Mapping[Any, int], original: Callable[..., Any], dispatcher: Any, name: str, **kwargs: Any) -> Any:
    """Run a dispatcher's ``name`` (dispatch, combine or a half of one), unless a segment is being captured.

    A capture would not fail there, it would spin. Graphs of other kinds than breakable ones (the
    decode graph's low-latency dispatch) are captured as ever.
    """
    if current_capture() is not None:
        raise CaptureError(
            f"layer {layers.get(dispatcher, 'unknown')}: the model called {name} of the expert dispatcher while a "
            "segment was captured, not from a break: it would wait for the other ranks' counts for good. Two-batch "
            "overlap does this: drop --enable-two-batch-overlap, or pass --disable-prefill-cuda-graph"
        )
    return original(dispatcher, name, **kwargs)


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
