"""DeepEP's ``Buffer`` over gloo, for processes without a GPU.

Contract: a caller that works with ``deep_ep.Buffer`` the way SGLang's dispatchers do gets the same
tensors here, on CPU, and the tokens really cross the ranks of the process group it passes.

* Normal mode delivers one row per (token, rank), with the expert ids made local; the experts weigh,
  combine sums.
* Low-latency mode delivers one row per (token, expert), in slots of fixed size; combine weighs.

``counters`` says what crossed in this process. ``capturing`` is a hook, None by default: while it
returns true, every rank-coupled call raises `CollectiveInCapture`, since normal DeepEP waits on the
host for the other ranks' counts there and spins until its timeout.

Limits: no streams (events are always complete, the receive hook does nothing), no FP8 payload, no
cached-handle dispatch, one rank per process, and a missing peer is found by gloo's timeout only.
Only a process with the folder made by `deep_ep_folder.write_distribution` on its path sees this as ``deep_ep``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

# The payload of one row must be a whole number of these bytes: DeepEP moves rows as int4 vectors.
VECTOR_BYTES = 16


@dataclass
class Counters:
    """What this process did. Rows that stayed on their own rank are only ``rows_kept``."""

    dispatch: int = 0
    combine: int = 0
    low_latency_dispatch: int = 0
    low_latency_combine: int = 0
    rows_sent: int = 0
    rows_received: int = 0
    rows_kept: int = 0
    refused_in_capture: int = 0

    def as_dict(self) -> dict[str, int]:
        """The counts as builtins, so that a server can put them into its state report."""
        return asdict(self)


counters = Counters()
capturing: Callable[[], bool] | None = None


class CollectiveInCapture(RuntimeError):
    """A rank-coupled call was made while a graph segment was being captured."""


def _enter(call: str, consequence: str) -> None:
    """Refuse a rank-coupled call inside a capture; say what it would do on a GPU."""
    if capturing is not None and capturing():
        counters.refused_in_capture += 1
        raise CollectiveInCapture(
            f"deep_ep.Buffer.{call} was called while a graph segment is being captured: "
            f"{consequence}. Make it in an eager break between two segments, with a capture stub."
        )


SPINS = "it waits on the host for the other ranks, so real DeepEP spins there until its timeout"
HOST_READ = "this stand-in reads counts on the host, which no replay would repeat"


class Config:
    """Tuning values of a DeepEP kernel. Kept, and without effect: gloo has nothing to tune."""

    def __init__(self, num_sms: int = 20, *chunk_sizes: int, **named_chunk_sizes: int) -> None:
        self.num_sms = num_sms
        self.chunk_sizes = (*chunk_sizes, *named_chunk_sizes.values())

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of NVLink buffer needed: none."""
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        """Bytes of RDMA buffer needed: none."""
        return 0


class EventOverlap:
    """An event that has happened: a gloo call returns when it is done."""

    def current_stream_wait(self) -> None:
        """Return at once."""


class NormalHandle(NamedTuple):
    """What combine needs to send rows back the way dispatch brought them."""

    token: torch.Tensor
    """For every row sent, in send order (by destination, then token): its token."""
    sent: list[int]
    received: list[int]
    num_tokens: int


class LowLatencyHandle(NamedTuple):
    """What the low-latency combine needs; ``slot`` is where each received row was put."""

    token: torch.Tensor
    choice: torch.Tensor
    slot: torch.Tensor
    sent: list[int]
    received: list[int]
    shape: torch.Size


DispatchLayout = tuple[torch.Tensor, None, torch.Tensor, torch.Tensor, EventOverlap]
Dispatched = tuple[torch.Tensor, torch.Tensor, torch.Tensor, list[int], NormalHandle, EventOverlap]
LowLatencyDispatched = tuple[
    torch.Tensor, torch.Tensor, LowLatencyHandle, EventOverlap, Callable[[], None]
]


class Buffer:
    """One rank's end of the exchange over ``group``; all ranks make the same calls in one order."""

    num_sms = 20

    def __init__(
        self,
        group: dist.ProcessGroup,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        *,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 1,
        allow_mnnvl: bool = False,
        use_fabric: bool = False,
    ) -> None:
        self.group = group
        self.rank = group.rank()
        self.group_size = group.size()
        self.low_latency_mode = low_latency_mode

    @staticmethod
    def set_num_sms(num_sms: int) -> None:
        """Remember the SM count that `Config` defaults to."""
        Buffer.num_sms = num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event for the work enqueued so far."""
        return EventOverlap()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default configuration for dispatch."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default configuration for combine."""
        return Config(Buffer.num_sms)

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes of RDMA buffer needed: none."""
        return 0

    def clean_low_latency_buffer(
        self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int
    ) -> None:
        """Nothing to clean: every low-latency dispatch returns fresh slots."""

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> DispatchLayout:
        """Count, on this rank alone, where its tokens go; -1 goes nowhere.

        Returns tokens per rank, None (there are no RDMA ranks), choices per expert, the (token,
        rank) mask and an event. A token that chose two experts of one rank counts once for it.
        """
        local = self._experts_per_rank(num_experts)
        _check_choices(topk_idx, num_experts)
        chosen = topk_idx >= 0
        in_rank = torch.zeros(topk_idx.shape[0], self.group_size + 1, dtype=torch.bool)
        # The last column takes the -1s and is cut off.
        in_rank.scatter_(1, torch.where(chosen, topk_idx // local, self.group_size), True)
        in_rank = in_rank[:, :-1].contiguous()
        per_expert = torch.bincount(topk_idx[chosen], minlength=num_experts).to(torch.int32)
        return in_rank.sum(0, dtype=torch.int32), None, per_expert, in_rank, EventOverlap()

    def dispatch(
        self,
        x: torch.Tensor,
        *,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        num_tokens_per_rank: torch.Tensor,
        is_token_in_rank: torch.Tensor,
        num_tokens_per_expert: torch.Tensor,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
        expert_alignment: int = 1,
        config: Config | None = None,
    ) -> Dispatched:
        """Send every token once to each rank that owns one of its experts.

        Returns rows (by source rank, then source token), their expert ids counted from this
        rank's first expert (-1: an expert elsewhere), weights (0 where -1), the number of choices
        per local expert rounded up to ``expert_alignment``, the handle for `combine`, an event.
        """
        _enter("dispatch", SPINS)
        counters.dispatch += 1
        _check_rows(x)
        num_experts = num_tokens_per_expert.numel()
        local = self._experts_per_rank(num_experts)
        _check_choices(topk_idx, num_experts)
        if topk_weights.dtype != torch.float32 or topk_weights.shape != topk_idx.shape:
            raise TypeError(
                f"topk_weights must be float32 {tuple(topk_idx.shape)}, "
                f"got {topk_weights.dtype} {tuple(topk_weights.shape)}"
            )
        # Transposed, so that the rows come out by destination, then by token.
        token = is_token_in_rank.t().nonzero()[:, 1]
        sent = num_tokens_per_rank.tolist()
        received = self._exchange_counts(sent)
        rows = self._exchange(x[token], sent, received)
        idx = self._exchange(topk_idx[token], sent, received) - self.rank * local
        weights = self._exchange(topk_weights[token], sent, received)
        mine = (idx >= 0) & (idx < local)
        idx = torch.where(mine, idx, -1)
        per_expert = torch.bincount(idx[mine], minlength=local)
        aligned = (per_expert + expert_alignment - 1) // expert_alignment * expert_alignment
        self._count(sent, received)
        handle = NormalHandle(token, sent, received, x.shape[0])
        return rows, idx, weights.masked_fill(~mine, 0.0), aligned.tolist(), handle, EventOverlap()

    def combine(
        self,
        x: torch.Tensor,
        handle: NormalHandle,
        *,
        async_finish: bool = False,
        previous_event: EventOverlap | None = None,
        allocate_on_comm_stream: bool = False,
        config: Config | None = None,
    ) -> tuple[torch.Tensor, None, EventOverlap]:
        """Return every row to its token and add up the rows of one token, by rank, in float32.

        ``x`` has dispatch's rows, weighted by the experts. A token that went nowhere gets zeros.
        """
        _enter("combine", SPINS)
        counters.combine += 1
        _check_rows(x)
        if x.shape[0] != sum(handle.received):
            raise ValueError(
                f"combine got {x.shape[0]} rows, dispatch delivered {sum(handle.received)}"
            )
        back = self._exchange(x, handle.received, handle.sent)
        total = torch.zeros(handle.num_tokens, x.shape[1], dtype=torch.float32)
        total.index_add_(0, handle.token, back.float())
        self._count(handle.received, handle.sent)
        return total.to(x.dtype), None, EventOverlap()

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        *,
        use_fp8: bool = True,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> LowLatencyDispatched:
        """Send every (token, expert) choice to the expert's rank, into that expert's slots.

        Returns slots ``[local experts, ranks * num_max, hidden]``, used slots per expert, the
        handle, an event and the receive hook. Unused slots are NaN, so that reading one shows.
        """
        _enter("low_latency_dispatch", HOST_READ)
        if use_fp8:
            raise NotImplementedError(
                "the gloo stand-in sends rows as they are; start the server with "
                "--deepep-dispatcher-output-dtype bf16"
            )
        counters.low_latency_dispatch += 1
        _check_rows(x)
        local = self._experts_per_rank(num_experts)
        _check_choices(topk_idx, num_experts)
        if x.shape[0] > num_max_dispatch_tokens_per_rank:
            raise ValueError(
                f"{x.shape[0]} tokens exceed num_max_dispatch_tokens_per_rank="
                f"{num_max_dispatch_tokens_per_rank}"
            )
        token, choice = (topk_idx >= 0).nonzero(as_tuple=True)
        # Sorted by expert, thereby by rank; stable, so that equal experts stay in token order.
        expert, order = torch.sort(topk_idx[token, choice], stable=True)
        token, choice = token[order], choice[order]
        sent = torch.bincount(expert // local, minlength=self.group_size).tolist()
        received = self._exchange_counts(sent)
        rows = self._exchange(x[token], sent, received)
        expert = self._exchange(expert.unsqueeze(1), sent, received).squeeze(1) - self.rank * local
        count = torch.bincount(expert, minlength=local)
        by_expert = torch.argsort(expert, stable=True)
        place = torch.empty_like(expert)
        starts = count.cumsum(0) - count
        place[by_expert] = torch.arange(expert.numel()) - starts[expert[by_expert]]
        slots = x.new_full(
            (local, self.group_size * num_max_dispatch_tokens_per_rank, x.shape[1]), torch.nan
        )
        slot = expert * slots.shape[1] + place
        slots.view(-1, x.shape[1])[slot] = rows
        self._count(sent, received)
        handle = LowLatencyHandle(token, choice, slot, sent, received, slots.shape)
        return slots, count.to(torch.int32), handle, EventOverlap(), _received

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: LowLatencyHandle,
        *,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor, EventOverlap, Callable[[], None]]:
        """Return every used slot to its token and add them up, weighted, in float32.

        A rank's share is summed before the ranks are, as in normal mode: both round alike.
        """
        _enter("low_latency_combine", HOST_READ)
        counters.low_latency_combine += 1
        if x.shape != handle.shape:
            raise ValueError(
                f"combine got slots {tuple(x.shape)}, dispatch made {tuple(handle.shape)}"
            )
        rows = x.reshape(-1, x.shape[-1])[handle.slot]
        back = self._exchange(rows, handle.received, handle.sent).float()
        weighted = back * topk_weights[handle.token, handle.choice].float().unsqueeze(1)
        total = torch.zeros(topk_idx.shape[0], x.shape[-1], dtype=torch.float32)
        tokens = handle.token.split_with_sizes(handle.sent)
        for token, share in zip(tokens, weighted.split_with_sizes(handle.sent), strict=True):
            total += torch.zeros_like(total).index_add_(0, token, share)
        self._count(handle.received, handle.sent)
        return total.to(x.dtype), EventOverlap(), _received

    def _experts_per_rank(self, num_experts: int) -> int:
        if num_experts % self.group_size:
            raise ValueError(f"{num_experts} experts do not divide among {self.group_size} ranks")
        return num_experts // self.group_size

    def _exchange_counts(self, sent: list[int]) -> list[int]:
        received = torch.empty(self.group_size, dtype=torch.int64)
        dist.all_to_all_single(received, torch.tensor(sent), group=self.group)
        counts: list[int] = received.tolist()
        return counts

    def _exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """Rows split by ``sent`` to the ranks; the ranks' rows for us, in rank order."""
        # As bytes: gloo moves any element type that way.
        raw = rows.contiguous().view(torch.uint8)
        out = raw.new_empty((sum(received), raw.shape[1]))
        dist.all_to_all_single(out, raw, received, sent, group=self.group)
        return out.view(rows.dtype)

    def _count(self, sent: list[int], received: list[int]) -> None:
        counters.rows_kept += sent[self.rank]
        counters.rows_sent += sum(sent) - sent[self.rank]
        counters.rows_received += sum(received) - received[self.rank]


def _received() -> None:
    """The receive hook: the rows are there already."""


def _check_rows(x: torch.Tensor) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError("the gloo stand-in sends plain rows, not (FP8 rows, scales)")
    if x.dim() != 2 or not x.is_contiguous() or x.shape[1] * x.element_size() % VECTOR_BYTES:
        raise ValueError(
            f"DeepEP asks for a contiguous matrix, rows a multiple of {VECTOR_BYTES} bytes; "
            f"got {tuple(x.shape)} {x.dtype}, contiguous: {x.is_contiguous()}"
        )


def _check_choices(topk_idx: torch.Tensor, num_experts: int) -> None:
    if topk_idx.dtype != torch.int64 or topk_idx.dim() != 2:
        raise TypeError(f"topk_idx must be an int64 matrix, got {topk_idx.shape} {topk_idx.dtype}")
    if bool(((topk_idx < -1) | (topk_idx >= num_experts)).any()):
        raise ValueError(f"topk_idx holds ids outside -1..{num_experts - 1}")
