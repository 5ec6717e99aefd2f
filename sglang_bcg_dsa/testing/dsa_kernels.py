"""CPU kernels for what DeepSeek sparse attention (DSA) has for a GPU only: indexer, top-k, attention.

Contract: the functions have the names, arguments and results of the kernels they stand in for
(DeepGEMM's, sgl-kernel's, FlashMLA's and SGLang's own). A row's result depends neither on the
other rows nor on how many there are: dot products of FP8 numbers are exact in double precision,
everything else is summed in double and rounded once. Top-k breaks ties by position, and gives
positions in ascending order, so attention always sums in the same order.

What a kernel may leave undefined is made visible here: logits beyond a row's context are NaN. What
it may not touch is refused: within `batch_slots` caches are written at the batch's new tokens, once
each, and attention reads the batch's requests; outside (warm-up, capture), and for rows beyond the
batch's tokens, there is `PADDING_SLOT` only. Anything else is a live request's, and raises.

Those that a captured segment may hold compute with tensors of fixed shape, or are one operator. Their
checks are operators, so a tape runs them again at each replay, against the batch of that replay; the rest
run in breaks.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_bcg_dsa.testing.kernels import invariant_mm, operator
from sglang_bcg_dsa.testing.tape import allow_host_reads

PADDING_SLOT = 0
FP8_MAX = 448.0
SCALE_BYTES = 4  # one float32 per cached token


class _Slots(NamedTuple):
    written: frozenset[int] = frozenset()
    read: frozenset[int] = frozenset()


_batch = _Slots()


@contextmanager
def batch_slots(*, written: Iterable[int] = (), read: Iterable[int] = ()) -> Iterator[None]:
    """The cache slots which the batch that runs inside may write, and read."""
    global _batch
    before, _batch = _batch, _Slots(frozenset(written), frozenset(read))
    try:
        yield
    finally:
        _batch = before


@torch.library.custom_op("sglang_bcg_dsa_testing::check_written", mutates_args=())
def _check_written(loc: Tensor) -> None:
    with allow_host_reads("an operator: it reads again at each replay"):
        slots = [slot for slot in loc.tolist() if slot != PADDING_SLOT]
    _refuse("write", set(slots) - _batch.written)
    if len(set(slots)) != len(slots):
        raise RuntimeError("sglang_bcg_dsa.testing: a KV cache slot is written by two rows of a batch")


@torch.library.custom_op("sglang_bcg_dsa_testing::check_read", mutates_args=())
def _check_read(chosen: Tensor) -> None:
    with allow_host_reads("an operator: it reads again at each replay"):
        slots = set(chosen.flatten().tolist())
    _refuse("read", slots - _batch.read - {-1, PADDING_SLOT})


def _refuse(verb: str, foreign: set[int]) -> None:
    if foreign:
        raise RuntimeError(
            f"sglang_bcg_dsa.testing: rows {verb} KV cache slots {sorted(foreign)}, which are not "
            f"this batch's; a row beyond its tokens may {verb} slot {PADDING_SLOT} only"
        )


class IndexedTensor(torch.Tensor):
    """A CPU tensor that calls its device ``cpu:0``: the host's indexer demands an index of one."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cpu", 0)


def unavailable(*_: Any, **__: Any) -> Any:
    """A kernel which the host imports, and DSA does not use."""
    raise NotImplementedError("this kernel has no form for the CPU")


# --- the indexer's inputs -----------------------------------------------------------------------


def act_quant(
    x: Tensor, block_size: int = 128, scale_fmt: str | None = None
) -> tuple[Tensor, Tensor]:
    """FP8 values of ``x``, and a float32 scale for each ``block_size`` of its last dimension.

    With a ``scale_fmt`` scales are powers of two.
    """
    blocks = x.float().unflatten(-1, (-1, block_size))
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-4) / FP8_MAX
    if scale_fmt is not None:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (blocks / scale[..., None]).clamp(-FP8_MAX, FP8_MAX).flatten(-2)
    return values.to(torch.float8_e4m3fn).as_subclass(IndexedTensor), scale


def hadamard_transform(x: Tensor, scale: float = 1.0) -> Tensor:
    """``x`` times the Hadamard matrix of its last dimension (a power of two), times ``scale``."""
    size = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat(
            [torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)]
        )
    return (invariant_mm(x.reshape(-1, size).double(), matrix) * scale).to(x.dtype).view(x.shape)


def mm_to(a: Tensor, b: Tensor, out_dtype: torch.dtype) -> Tensor:
    """``a @ b`` of any floating types, rounded to ``out_dtype``."""
    return invariant_mm(a.double(), b.double()).to(out_dtype)


# --- the caches ---------------------------------------------------------------------------------


def set_mla_kv_buffer(buffer: Tensor, loc: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Write rows ``[nope, rope]`` into slots ``loc`` of the latent cache ``[slots, 1, width]``."""
    _check_written(loc)
    rows = torch.cat([nope.reshape(len(loc), -1), rope.reshape(len(loc), -1)], dim=-1)
    buffer.view(buffer.shape[0], -1)[loc.long()] = rows.to(buffer.dtype)


def no_fused_store(*_: Any) -> bool:
    """Quantize and store in two steps."""
    return False


def _index_pages(buffer: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Views of index-K pages: FP8 bytes [pages, page, dim], then scales [pages, page]."""
    keys = buffer.shape[1] - page_size * SCALE_BYTES
    scales = buffer.view(torch.float32)[:, keys // SCALE_BYTES :]
    return buffer[:, :keys].unflatten(1, (page_size, -1)), scales


def set_index_k(
    buf: Tensor, loc: Tensor, index_k: Tensor, index_k_scale: Tensor, page_size: int
) -> None:
    """Write FP8 keys [rows, dim] and their scales into slots ``loc`` of the index-K pages."""
    _check_written(loc)
    keys, scales = _index_pages(buf, page_size)
    page, row = loc.long() // page_size, loc.long() % page_size
    keys[page, row] = index_k.as_subclass(torch.Tensor).view(torch.uint8)
    scales[page, row] = index_k_scale.reshape(-1)


def get_index_k(
    buf: Tensor,
    page_indices: Tensor,
    seq_lens: Tensor,
    seq_len_sum: int,
    max_seq_len: int,
    page_size: int,
    index_head_dim: int,
) -> tuple[Tensor, Tensor]:
    """Bytes of the keys [sum of lengths, dim] and scales [sum, 4] of all requests, one after another.

    ``page_indices`` [requests, pages].
    """
    keys, scales = _index_pages(buf, page_size)
    positions = [torch.arange(length) for length in seq_lens.tolist()]
    pages = torch.cat(
        [pages[at // page_size] for pages, at in zip(page_indices.long(), positions, strict=True)]
    )
    rows = torch.cat(positions) % page_size
    found = scales[pages, rows].contiguous().view(torch.uint8).view(-1, SCALE_BYTES)
    return keys[pages, rows], found


# --- scores and selection -----------------------------------------------------------------------


def _scores(q: Tensor, k: Tensor, k_scale: Tensor, weights: Tensor) -> Tensor:
    """For each row and key, the heads' positive products, weighted; [rows, keys] float32.

    ``q`` [rows, heads, dim] and ``k`` [keys, dim] are FP8: their products are exact in double.
    """
    live = weights.any(dim=0)  # the host pads the heads with zeros
    q, weights = q.as_subclass(torch.Tensor).double()[:, live], weights.double()[:, live]
    # baddbmm, because the CPU platform does mm and bmm in blocks, which exact sums do not need.
    products = torch.baddbmm(q.new_zeros(()), q.flatten(0, 1)[None], k.double().t()[None], beta=0)
    # Head by head: a sum over a dimension may be split by the sizes of the others.
    total = q.new_zeros(q.shape[0], k.shape[0])
    for head, product in enumerate(products.view(*q.shape[:2], k.shape[0]).unbind(1)):
        total += product.clamp(min=0) * weights[:, head, None]
    return (total * k_scale.double()).float()


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Index scores of rows against one run of keys; row r sees keys ``ks[r]`` to ``ke[r]``."""
    keys, scales = kv
    column = torch.arange(keys.shape[0])
    seen = (column >= ks[:, None]) & (column < ke[:, None])
    beyond = float("-inf") if clean_logits else float("nan")
    return _scores(q, keys, scales, weights).masked_fill(~seen, beyond)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_tables: Tensor,
    schedule: Tensor,
    max_context_len: int,
    clean_logits: bool = False,
) -> Tensor:
    """Index scores of one row a request against its pages, [requests, max_context_len].

    ``q`` [requests, 1, heads, dim], ``kv_cache`` [pages, page, 1, dim + 4] as the pool lays it out,
    ``context_lens`` [requests, 1].
    """
    if q.shape[1] != 1:
        raise NotImplementedError(f"CPU index scores are for one row a request, not {q.shape[1]}")
    scores: Tensor = _paged_scores(
        q[:, 0].as_subclass(Tensor), kv_cache, weights, context_lens.flatten(), block_tables, max_context_len
    )
    return scores.nan_to_num(float("-inf")) if clean_logits else scores


@operator()
def _paged_scores(
    q: Tensor, kv_cache: Tensor, weights: Tensor, lengths: Tensor, block_tables: Tensor, width: int
) -> Tensor:
    page_size = kv_cache.shape[1]
    keys, scales = _index_pages(kv_cache.flatten(1), page_size)
    out = torch.full((q.shape[0], width), float("nan"))
    # Rows of one request follow each other: its keys are gathered once.
    first = 0
    for end in range(1, len(q) + 1):
        if end < len(q) and torch.equal(block_tables[end], block_tables[first]):
            continue
        longest = int(lengths[first:end].max())
        pages = block_tables[first, : -(-longest // page_size)].long()
        k = keys[pages].flatten(0, 1)[:longest].view(torch.float8_e4m3fn)
        found = _scores(q[first:end], k, scales[pages].flatten()[:longest], weights[first:end])
        beyond = torch.arange(longest) >= lengths[first:end, None]
        out[first:end, :longest] = found.masked_fill(beyond, float("nan"))
        first = end
    return out


def get_num_sms() -> int:
    """Some number: the host divides work by it."""
    return 8


def get_paged_mqa_logits_metadata(context_lens: Tensor, block_kv: int, num_sms: int) -> Tensor:
    """A schedule over SMs, of which there are none."""
    return torch.zeros(num_sms + 1, 2, dtype=torch.int32)


def fast_topk_v2(
    score: Tensor, lengths: Tensor, topk: int, row_starts: Tensor | None = None
) -> Tensor:
    """Positions [rows, topk] of each row's highest scores, ascending, then -1.

    Row r considers ``score[r, start : start + lengths[r]]``; positions count from its start. Of
    equal scores the earlier position wins.
    """
    rows, width = score.shape
    starts = lengths.new_zeros(rows) if row_starts is None else row_starts
    column = torch.arange(width)
    seen = (column >= starts[:, None]) & (column < (starts + lengths)[:, None])
    # A score may itself be -inf; it still comes before what is not seen.
    ranked = score.clamp(min=torch.finfo(score.dtype).min).masked_fill(~seen, float("-inf"))
    best = ranked.sort(dim=1, descending=True, stable=True).indices[:, :topk]
    position = torch.where(seen.gather(1, best), best - starts[:, None], width).sort(dim=1).values
    out = torch.full((rows, topk), -1, dtype=torch.int32)
    out[:, : position.shape[1]] = position.masked_fill(position == width, -1)
    return out


def fast_topk_transform_fused(
    score: Tensor,
    lengths: Tensor,
    page_table_size_1: Tensor,
    cu_seqlens_q: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`fast_topk_v2`, then each position's cache slot by the page table of the row's request."""
    position = fast_topk_v2(score, lengths, topk, row_starts).long()
    request = torch.searchsorted(
        cu_seqlens_q[1:].contiguous(), torch.arange(len(position)).to(cu_seqlens_q), right=True
    )
    slots = page_table_size_1[request].gather(1, position.clamp(min=0))
    return torch.where(position >= 0, slots, -1).to(torch.int32)


def fast_topk_transform_ragged_fused(
    score: Tensor,
    lengths: Tensor,
    topk_indices_offset: Tensor,
    topk: int,
    row_starts: Tensor | None = None,
) -> Tensor:
    """`fast_topk_v2`, then each position's place among the keys of all requests."""
    position = fast_topk_v2(score, lengths, topk, row_starts)
    moved = position + topk_indices_offset[: len(position), None]
    return torch.where(position >= 0, moved, -1).to(torch.int32)


# --- attention ----------------------------------------------------------------------------------


def flash_mla_sparse_fwd(
    q: Tensor,
    kv: Tensor,
    indices: Tensor,
    sm_scale: float,
    d_v: int = 512,
    attn_sink: Tensor | None = None,
    topk_length: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None, None]:
    """Attention of each row over the cache rows it selected; the statistics are not computed.

    ``q`` [rows, heads, width], ``kv`` [slots, 1, width], ``indices`` [rows, 1, topk] with -1 for
    none; of row r only the first ``topk_length[r]`` count. A row that selected nothing comes out
    as zeros.
    """
    if attn_sink is not None:
        raise NotImplementedError("CPU sparse attention has no sinks")
    chosen = indices[:, 0].long()
    if topk_length is not None:
        beyond = torch.arange(chosen.shape[1]) >= topk_length[:, None]
        chosen = chosen.masked_fill(beyond, -1)
    _check_read(chosen)
    valid = (chosen >= 0)[:, None]
    picked = kv[:, 0][chosen.clamp(min=0)].double()
    scores = torch.bmm(q.double(), picked.transpose(1, 2)) * sm_scale
    weights = torch.softmax(scores.masked_fill(~valid, float("-inf")), dim=-1)
    out = torch.bmm(torch.where(valid, weights, 0.0), picked[..., :d_v])
    return out.to(q.dtype), None, None
