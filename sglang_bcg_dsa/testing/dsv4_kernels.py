"""CPU kernels for what DeepSeek-V4 has for a GPU only: norms, compressor, indexer, caches, attention.

Contract: the functions have the names, arguments and results of the kernels they stand in for. A
row's result depends neither on the other rows nor on how many there are: sums are made in double
and rounded once. Top-k breaks ties by position and gives positions in ascending order. What a
kernel leaves undefined (rows of an invalid plan) is NaN here, and stores of such rows are left out.

Those that a captured segment may hold are one operator each: opaque to a tape, as a kernel is to a
graph, and run again at each replay. So they may look at values. The others run in breaks or before
a forward.

Layouts, as the host's pools have them (P rows a page): latent pages are P x 576 bytes (448 FP8, 64
bfloat16), then P x 8 bytes (7 scales, powers of two by their exponent), padded to a multiple of
576; index pages are P x 128 FP8, then P float32 scales. Plans are bytes: `CompressPlan` int32[4] =
(sequence length, ragged row | buffered rows << 16, page, page), `WritePlan` int32[2] = (ragged
row, slot), `DecodePlan` int32[4] = (sequence length, slot, page, page); -1 first: no plan.
"""

# mypy: allow-untyped-calls, disable-error-code=misc
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_bcg_dsa.testing.dsa_kernels import (
    FP8_MAX,
    fast_topk_v2,
    hadamard_transform,
)
from sglang_bcg_dsa.testing.kernels import invariant_mm, operator

NOPE, ROPE, TILE = 448, 64, 64
LATENT = NOPE + ROPE
LATENT_BYTES, SCALE_BYTES = NOPE + 2 * ROPE, 8
INDEX_DIM = 128
INVALID = -1
_ROWS = 64  # attention is computed for so many rows at a time, for memory's sake


# --- norms and rotation -------------------------------------------------------------------------


def _normed(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """``x`` over its root mean square, times ``weight``; in double."""
    x = x.double()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return x if weight is None else x * weight.double()


def _rotated(x: Tensor, freqs_cis: Tensor, positions: Tensor, inverse: bool = False) -> Tensor:
    """Neighbouring pairs of ``x`` [rows, ..., 64] turned by the rows' positions; in double."""
    turn = freqs_cis[positions.long()].to(torch.complex128)
    turn = (turn.conj() if inverse else turn).view(len(x), *[1] * (x.dim() - 2), x.shape[-1] // 2)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (x.shape[-1] // 2, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


@operator("q_output")
def _q_norm_rope(q_input: Tensor, q_output: Tensor, eps: float, freqs_cis: Tensor, positions: Tensor) -> None:
    normed = _normed(q_input, eps).to(q_input.dtype)
    q_output[..., :-ROPE] = normed[..., :-ROPE]
    q_output[..., -ROPE:] = _rotated(normed[..., -ROPE:], freqs_cis, positions).to(q_output.dtype)


def fused_q_norm_rope(q_input: Tensor, q_output: Tensor, eps: float | None, freqs_cis: Tensor, positions: Tensor) -> None:
    """Queries [rows, heads, 512], normed by head, their last 64 rotated, into ``q_output``."""
    if eps is None:
        raise NotImplementedError("CPU queries are normed")
    _q_norm_rope(q_input, q_output, eps, freqs_cis, positions)


@operator("x")
def _rope_inplace(x: Tensor, freqs_cis: Tensor, positions: Tensor, inverse: bool) -> None:
    x.copy_(_rotated(x, freqs_cis, positions, inverse))


def fused_rope_inplace(q: Tensor, k: Tensor | None, freqs_cis: Tensor, positions: Tensor, inverse: bool = False) -> None:
    """Rotate ``q`` (and ``k``) [rows, heads, 64] in place; ``inverse`` turns back."""
    for x in (q, k):
        if x is not None:
            _rope_inplace(x, freqs_cis, positions, inverse)


# --- the latent cache ---------------------------------------------------------------------------


def _exponent_byte(largest: Tensor) -> Tensor:
    """The exponent, 127 more, of the least power of two not below ``largest / 448``."""
    mantissa, exponent = torch.frexp(largest.float().clamp(min=1e-4) / FP8_MAX)
    return (exponent - (mantissa == 0.5).to(exponent.dtype) + 127).to(torch.uint8)


def _power_of_two(byte: Tensor) -> Tensor:
    return (byte.int() << 23).view(torch.float32)


def _to_fp8(x: Tensor) -> Tensor:
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def latent_rows(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Views of pages [pages, bytes]: values [pages, P, 576] and scales [pages, P, 8], as bytes."""
    pages = cache.view(torch.uint8)
    end = page_size * LATENT_BYTES
    values = pages[:, :end].unflatten(1, (page_size, LATENT_BYTES))
    return values, pages[:, end : end + page_size * SCALE_BYTES].unflatten(1, (page_size, SCALE_BYTES))


def _check_layout(layout: Any) -> None:
    """Later hosts have other layouts, for DeepSeek-V4.1."""
    if layout is not None and str(getattr(layout, "value", layout)).lower() != "v4":
        raise NotImplementedError(f"CPU latent rows are laid out as DeepSeek-V4's, not as {layout}")


def _store_latent(cache: Tensor, page_size: int, slot: Tensor, nope: Tensor, rope: Tensor) -> None:
    """Quantize ``nope`` [rows, 448] by 64, and write it with ``rope`` into ``slot``s."""
    values, scales = latent_rows(cache, page_size)
    tiles = nope.float().unflatten(-1, (NOPE // TILE, TILE))
    byte = _exponent_byte(tiles.abs().amax(-1))
    fp8 = _to_fp8(tiles / _power_of_two(byte)[..., None]).flatten(-2).view(torch.uint8)
    page, row = slot.long() // page_size, slot.long() % page_size
    values[page, row] = torch.cat([fp8, rope.to(torch.bfloat16).contiguous().view(torch.uint8)], -1)
    scales[page, row, : byte.shape[-1]] = byte


def read_latent(cache: Tensor, page_size: int, slot: Tensor) -> Tensor:
    """Rows [..., 512] in float32 (exact) of ``slot`` [...]."""
    values, scales = latent_rows(cache, page_size)
    page, row = slot.long() // page_size, slot.long() % page_size
    bytes_, scale = values[page, row], scales[page, row, : NOPE // TILE]
    fp8 = bytes_[..., :NOPE].contiguous().view(torch.float8_e4m3fn).float()
    nope = (fp8.unflatten(-1, (NOPE // TILE, TILE)) * _power_of_two(scale)[..., None]).flatten(-2)
    rope = bytes_[..., NOPE:].contiguous().view(torch.bfloat16).float()
    return torch.cat([nope, rope], dim=-1)


@operator("kvcache")
def _k_norm_rope(
    kv: Tensor,
    kv_weight: Tensor,
    eps: float,
    freqs_cis: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
) -> None:
    keep = out_loc >= 0
    normed = _normed(kv[keep], eps, kv_weight)
    rope = _rotated(normed[:, NOPE:], freqs_cis, positions[keep])
    _store_latent(kvcache, page_size, out_loc[keep], normed[:, :NOPE], rope)


def fused_k_norm_rope_flashmla(
    kv: Tensor,
    kv_weight: Tensor,
    eps: float,
    freqs_cis: Tensor,
    positions: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    layout: Any = None,
    q: None = None,
) -> None:
    """Norm, rotate and store keys [rows, 512] in slots ``out_loc``; -1 stores nothing."""
    _check_layout(layout)
    _k_norm_rope(kv, kv_weight, eps, freqs_cis, positions, out_loc, kvcache, page_size)


def dequantize_k_cache_paged(
    quant_k_cache: Tensor,
    page_table_1_flattened: Tensor,
    page_size: int,
    out: Tensor | None = None,
    layout: Any = None,
) -> Tensor:
    """Rows [slots, 1, 512] of the latent cache in bfloat16, into ``out`` if given."""
    _check_layout(layout)
    rows = read_latent(quant_k_cache, page_size, page_table_1_flattened).to(torch.bfloat16)[:, None]
    return rows if out is None else out.copy_(rows)


# --- the compressor -----------------------------------------------------------------------------


def _state_slot(
    ratio: int, ring_size: int, swa_page_size: int, request: int, position: int, to_slot: Tensor, to_state: Tensor
) -> int:
    """Where the compressor's state of a position lies: by request for 128, by cache slot for 4."""
    if ratio == 128:
        return request * ring_size + position % ring_size
    at = int(to_state[int(to_slot[request, position])])
    return at // swa_page_size * ring_size + at % ring_size


def _as_bytes(plans: list[tuple[int, ...]], width: int, rows: int) -> Tensor:
    """Plans as int32, then invalid ones up to ``rows``."""
    invalid = (-1, 0, -1, -1) if width == 4 else (-1, -1)
    whole = [*plans, *[invalid] * (rows - len(plans))]
    return torch.tensor(whole, dtype=torch.int32).view(-1, width).view(torch.uint8)


def prefill_plans(
    compress_ratio: int,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    req_to_token: Tensor,
    full_to_state: Tensor,
    swa_page_size: int,
    ring_size: int,
    num_q_tokens: int,
    padded: bool,
    tail: int = 0,
) -> tuple[Tensor, Tensor]:
    """Compress and write plans, in the order of tokens; ``padded``: one of each for every token.

    A token that ends a group is compressed; a token is written where a later batch may need it: ``tail`` of a request's
    last ones in any case, because speculation may take some back.
    """
    ratio, window = compress_ratio, compress_ratio * (2 if compress_ratio == 4 else 1)
    compress: list[tuple[int, ...]] = []
    write: list[tuple[int, ...]] = []
    first = 0
    lengths = zip(req_pool_indices.tolist(), seq_lens.tolist(), extend_lens.tolist(), strict=True)
    for batch, (request, end, new) in enumerate(lengths):
        slot = lambda position, r=request: _state_slot(  # noqa: E731
            ratio, ring_size, swa_page_size, r, position, req_to_token, full_to_state
        )
        kept = min(end // ratio * ratio - (ratio if ratio == 4 else 0), end - tail)
        for j, position in enumerate(range(end - new, end)):
            row = first + j
            if (position + 1) % ratio == 0:
                buffered = window - min(j + 1, window)
                pages = (-1, batch)
                if buffered:
                    pages = (slot(max(position - ratio, 0)) // ratio, slot(position) // ratio)
                compress.append((position + 1, row | buffered << 16, *pages))
            if position >= kept or (ratio == 4 and position % swa_page_size >= swa_page_size - ratio):
                write.append((row, slot(position)))
        first += new
    rows = num_q_tokens if padded else 0
    return _as_bytes(compress, 4, max(rows, len(compress))), _as_bytes(write, 2, max(rows, len(write)))


def decode_plans(
    compress_ratio: int,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    full_to_state: Tensor,
    seq_lens: Tensor,
    swa_page_size: int,
    ring_size: int,
) -> Tensor:
    """One plan a request, whose last token is new."""
    plans: list[tuple[int, ...]] = []
    for request, end in zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True):
        before, last = (
            _state_slot(compress_ratio, ring_size, swa_page_size, request, position, req_to_token, full_to_state)
            for position in (max(end - 1 - compress_ratio, 0), end - 1)
        )
        plans.append((end, last, before // compress_ratio, last // compress_ratio))
    return _as_bytes(plans, 4, len(plans))


def _pooled(kv: Tensor, score: Tensor) -> Tensor:
    """Per channel, ``kv`` [groups, window, dim] weighted by the softmax of its scores."""
    return (kv.double() * torch.softmax(score.double(), dim=1)).sum(1)


def _window(
    state: Tensor, page: tuple[Tensor, Tensor], new: Tensor, last: Tensor, buffered: Tensor, first: Tensor, ape: Tensor
) -> Tensor:
    """Compressed [groups, dim] from each group's window: its first ``buffered`` rows lie in state pages.

    The others end at row ``last`` of ``new``. With overlap (ratio 4) the window begins one group
    earlier, with other columns; the ``first`` group of a request has nothing there.
    """
    window, dim = ape.shape
    overlap = window == 8
    j = torch.arange(window)
    from_new = new[(last[:, None] - (window - 1) + j).clamp(min=0)]
    pages = torch.where(j < 4, page[0][:, None], page[1][:, None]) if overlap else page[1][:, None]
    from_state = state[pages.clamp(min=0), j % (4 if overlap else window)].to(new.dtype)
    rows = torch.where((j < buffered[:, None])[..., None], from_state, from_new)
    if not overlap:
        return _pooled(rows[..., :dim], rows[..., dim:].float() + ape.float())
    early = (j < 4)[None, :, None]
    kv = torch.where(early, rows[..., :dim], rows[..., dim : 2 * dim])
    score = torch.where(early, rows[..., 2 * dim : 3 * dim], rows[..., 3 * dim :])
    nothing = early & first[:, None, None]
    kv = kv.masked_fill(nothing, 0.0)
    score = score.masked_fill(nothing, torch.finfo(torch.float32).min)
    return _pooled(kv, score.float() + ape.float())


@operator("state", "out")
def _compress_prefill(state: Tensor, new: Tensor, out: Tensor, ape: Tensor, plan_c: Tensor, plan_w: Tensor) -> None:
    plan = plan_c.view(torch.int32)
    valid = plan[:, 0] != INVALID
    out[~valid] = float("nan")
    length, packed, page_0, page_1 = plan[valid].long().unbind(1)
    row, buffered = packed & 0xFFFF, packed >> 16
    out[valid] = _window(state, (page_0, page_1), new, row, buffered, length <= 4, ape).to(out.dtype)
    writes = plan_w.view(torch.int32)
    row, slot = writes[writes[:, 0] != INVALID].long().unbind(1)
    state.flatten(0, 1)[slot] = new[row].to(state.dtype)


@operator("state", "out")
def _compress_decode(state: Tensor, new: Tensor, out: Tensor, ape: Tensor, plan_d: Tensor) -> None:
    length, slot, page_0, page_1 = plan_d.view(torch.int32).long().unbind(1)
    state.flatten(0, 1)[slot] = new.to(state.dtype)
    ends = length % state.shape[1] == 0
    out[~ends] = float("nan")
    everything = torch.full_like(slot[ends], ape.shape[0])
    pages = (page_0[ends], page_1[ends])
    row = torch.zeros_like(slot[ends])
    out[ends] = _window(state, pages, new, row, everything, length[ends] <= 4, ape).to(out.dtype)


def compress_forward(
    kv_score_buffer: Tensor,
    kv_score_input: Tensor,
    ape: Tensor,
    plan: Any,
    *,
    head_dim: int,
    compress_ratio: int,
    out: Tensor | None = None,
    is_online: bool = False,
) -> Tensor:
    """Compressed keys [plans, head_dim], not yet normed; state kept for later batches.

    ``kv_score_buffer`` [pages, ratio, columns]; ``kv_score_input`` [rows, columns], where columns
    are values then scores (with overlap: earlier group's, own, earlier group's, own).
    """
    if is_online:
        raise NotImplementedError("CPU compression keeps tokens, not running sums")
    if out is None:
        out = kv_score_input.new_empty(plan[1].shape[0], head_dim)
    if plan.is_decode:
        _compress_decode(kv_score_buffer, kv_score_input, out, ape, plan[1])
    else:
        _compress_prefill(kv_score_buffer, kv_score_input, out, ape, plan[1], plan[2])
    return out


def _index_rows(cache: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Views of index pages: keys [pages, P, 128] as bytes, scales [pages, P] as float32."""
    end = page_size * INDEX_DIM
    return cache[:, :end].unflatten(1, (page_size, INDEX_DIM)), cache.view(torch.float32)[:, end // 4 :]


def _fp8_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """FP8 values of ``x`` [..., 128] and their float32 scale [...]."""
    x = x.float()
    scale = x.abs().amax(-1).clamp(min=1e-4) / FP8_MAX
    return _to_fp8(x * (1 / scale)[..., None]), scale


def _turned(x: Tensor) -> Tensor:
    """``x`` [..., 128] times the orthonormal Hadamard matrix; in double."""
    return hadamard_transform(x.double(), x.shape[-1] ** -0.5)


@operator("kvcache")
def _norm_rope_store(
    kv: Tensor,
    plan: Tensor,
    norm_weight: Tensor,
    norm_eps: float,
    freq_cis: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    ratio: int,
    decode: bool,
) -> None:
    length, packed = plan.view(torch.int32).long().unbind(1)[:2]
    keep = length % ratio == 0 if decode else length != INVALID
    row = torch.arange(len(plan)) if decode else packed & 0xFFFF
    slot = out_loc[row[keep]].long()
    normed = _normed(kv[keep], norm_eps, norm_weight)
    rope = _rotated(normed[:, -ROPE:], freq_cis, length[keep] - ratio)
    if kv.shape[-1] == INDEX_DIM:
        values, scale = _fp8_row(_turned(torch.cat([normed[:, :-ROPE], rope], dim=-1)))
        keys, scales = _index_rows(kvcache, page_size)
        keys[slot // page_size, slot % page_size] = values.view(torch.uint8)
        scales[slot // page_size, slot % page_size] = scale
    else:
        _store_latent(kvcache, page_size, slot, normed[:, :NOPE].to(torch.bfloat16), rope)


def compress_norm_rope_store(
    kv: Tensor,
    plan: Any,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    freq_cis: Tensor,
    out_loc: Tensor,
    kvcache: Tensor,
    page_size: int,
    use_fp4: bool = False,
    bf16_store: bool = False,
    layout: Any = None,
    fp8_2buff: bool = False,
    **_: Any,
) -> None:
    """Norm, rotate and store what `compress_forward` made, where its last token's ``out_loc`` says.

    Latent rows have 512 columns; index keys have 128, and are also turned by a Hadamard matrix.
    """
    _check_layout(layout)
    if use_fp4 or bf16_store or fp8_2buff:
        raise NotImplementedError("CPU compression stores FP8")
    _norm_rope_store(
        kv, plan[1], norm_weight, norm_eps, freq_cis, out_loc, kvcache, page_size, plan.compress_ratio, plan.is_decode
    )


# --- the indexer --------------------------------------------------------------------------------


@operator()
def _q_indexer(q: Tensor, weight: Tensor, weight_scale: float, freqs_cis: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    rope = _rotated(q[..., -ROPE:], freqs_cis, positions)
    values, scale = _fp8_row(_turned(torch.cat([q[..., :-ROPE].double(), rope], dim=-1)))
    return values, (weight.float() * weight_scale * scale)[..., None]


def fused_q_indexer_rope_hadamard_quant(
    q_input: Tensor, weight: Tensor, weight_scale: float, freqs_cis: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """FP8 index queries [rows, heads, 128], and head weights [rows, heads, 1] that carry their scales."""
    made: tuple[Tensor, Tensor] = _q_indexer(q_input, weight, float(weight_scale), freqs_cis, positions)
    return made


def get_paged_mqa_logits_metadata(seq_lens: Tensor, page_size: int, num_sm: int) -> Tensor:
    """A schedule over SMs, of which there are none."""
    return torch.zeros(num_sm + 1, 2, dtype=torch.int32)


def plan_topk_v2(seq_lens: Tensor, static_threshold: int = 0, *, out: Tensor | None = None) -> Tensor:
    """A schedule for `topk_transform_512_v2`, which needs none here."""
    return torch.zeros(len(seq_lens) + 1, 2, dtype=torch.int32) if out is None else out.zero_()


def topk_transform_512(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    out_raw_indices: Tensor | None = None,
) -> None:
    """Each row's best positions among its first ``seq_lens``, ascending, as cache slots; then -1.

    As many as ``out_page_indices`` [rows, topk] holds; ``out_raw_indices`` gets the positions.
    """
    position = fast_topk_v2(scores, seq_lens.flatten(), out_page_indices.shape[1])
    column = position.clamp(min=0).long()
    page = page_tables.gather(1, column // page_size)
    found = position >= 0
    out_page_indices.copy_(torch.where(found, page * page_size + column % page_size, -1))
    if out_raw_indices is not None:
        out_raw_indices.copy_(position)


def topk_transform_512_v2(
    scores: Tensor,
    seq_lens: Tensor,
    page_tables: Tensor,
    out_page_indices: Tensor,
    page_size: int,
    metadata: Tensor,
    out_raw_indices: Tensor | None = None,
) -> None:
    """The same."""
    topk_transform_512(scores, seq_lens, page_tables, out_page_indices, page_size, out_raw_indices)


def hash_topk(
    router_logits: Tensor,
    input_ids: Tensor,
    tid2eid: Tensor,
    num_fused_shared_experts: int = 0,
    routed_scaling_factor: float = 1.0,
    scoring_func: str = "sqrtsoftplus",
    **_: Any,
) -> tuple[Tensor, Tensor]:
    """Weights and ids [rows, experts] of the experts that a token's id stands for, whatever its logits.

    Weights are float32 and add up to one; shared experts come last.
    """
    if scoring_func != "sqrtsoftplus" or num_fused_shared_experts:
        raise NotImplementedError(f"CPU hash experts: no shared ones, scores by sqrtsoftplus, not {scoring_func}")
    ids = tid2eid[input_ids]
    scores = torch.nn.functional.softplus(router_logits.double()).sqrt().gather(1, ids.long())
    return (scores / scores.sum(-1, keepdim=True)).float(), ids.to(torch.int32)


# --- metadata -----------------------------------------------------------------------------------


def init_compression_metadata(
    seq_lens: Tensor,
    positions: Tensor,
    raw_out_loc: Tensor,
    page_table: Tensor | None = None,
    page_size: int = 0,
    compute_page_indices: bool = True,
) -> tuple[Tensor | None, ...]:
    """By row, for ratios 4 and 128: where its group goes (0: it ends none), the group's first
    position, compressed lengths and the same but at least 1; lastly the slots of 128's groups.
    """
    made: list[Tensor | None] = []
    for ratio in (4, 128):
        groups = seq_lens // ratio
        made += [
            torch.where(seq_lens % ratio == 0, raw_out_loc // ratio, 0).to(torch.int64),
            (positions // ratio * ratio).to(torch.int32),
            groups.to(torch.int32),
            groups.clamp(min=1).to(torch.int32),
        ]
    if not compute_page_indices:
        return (*made, None)
    assert page_table is not None
    per_page = page_size // 128
    column = torch.arange(page_table.shape[1] * per_page)
    slot = page_table[:, column // per_page] * per_page + column % per_page
    return (*made, torch.where(column < (seq_lens // 128)[:, None], slot, -1).to(torch.int32))


# --- attention ----------------------------------------------------------------------------------


def build_swa_token_ids(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    full_to_swa: Tensor,
    swa_window: int,
    total_swa: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Window-cache slots of what the requests' new rows see, one request after another.

    Then by request: first position, count, and offsets [requests + 1].
    """
    count = torch.minimum(seq_lens, extend_seq_lens + (swa_window - 1)).to(torch.int32)
    first = (seq_lens - count).to(torch.int32)
    offsets = torch.nn.functional.pad(count.cumsum(0), (1, 0)).to(torch.int32)
    spans = zip(req_pool_indices.tolist(), first.tolist(), seq_lens.tolist(), strict=True)
    slots = [full_to_swa[req_to_token[row, start:end].long()] for row, start, end in spans]
    return torch.cat(slots).to(torch.int32), first, count, offsets


def combine_topk_swa_indices(
    topk_indices: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    gather_lens: Tensor,
    compressed_base: Tensor,
    swa_base: Tensor,
    window_size: int,
    compress_ratio: int,
    topk: int,
    out_indices: Tensor | None = None,
    out_lens: Tensor | None = None,
    query_pos: Tensor | None = None,
    swa_indices: Tensor | None = None,
    swa_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Workspace rows of each query: its chosen groups, its window, then -1; and how many these are.

    Rows beyond the requests have none. The window is given, or ends at the query; the query's
    position is given, or follows from the requests' lengths.
    """
    row, start = torch.arange(len(topk_indices)), query_start_loc - query_start_loc[0]
    request = torch.searchsorted(start[1:].contiguous(), row.to(start), right=True)
    live = request < len(seq_lens)
    request = request.clamp(max=len(seq_lens) - 1)
    end, first = seq_lens[request], seq_lens[request] - gather_lens[request]
    position = end - start[1:][request] + row if query_pos is None else query_pos
    chosen = ((position + 1) // compress_ratio).clamp(max=topk) * live
    seen = ((position + 1).clamp(max=window_size) if swa_lengths is None else swa_lengths) * live
    column = torch.arange(-(-(topk + window_size) // 128) * 128)[None]
    group = topk_indices.gather(1, column.clamp(max=topk_indices.shape[1] - 1).expand(len(row), -1))
    group = torch.where(group >= 0, group + compressed_base[request, None], -1)
    offset = column - chosen[:, None]
    if swa_indices is None:
        near = (position - seen + 1 - first)[:, None] + offset
    else:
        near = swa_indices.gather(1, offset.clamp(0, window_size - 1))
    near = torch.where(near >= 0, near + swa_base[request, None], -1)
    table = torch.where(offset < 0, group, torch.where(offset < seen[:, None], near, -1)).to(torch.int32)
    count = (chosen + seen).to(torch.int32)
    return (
        table if out_indices is None else out_indices.copy_(table),
        count if out_lens is None else out_lens.copy_(count),
    )


def _products(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` by row. Not bmm, which the CPU platform does in blocks: a row's heads are always as many."""
    return torch.baddbmm(a.new_zeros(()), a, b, beta=0)


def _attend(q: Tensor, kv: Tensor, valid: Tensor, scale: float, d_v: int, sink: Tensor | None) -> Tensor:
    """Attention of ``q`` [rows, heads, 512] over ``kv`` [rows, keys, 512] where ``valid``; in double.

    A ``sink`` [heads] takes part in the softmax and adds nothing.
    """
    # Slot 0, which stands for none, holds what padding left there, even what is not a number.
    kv = torch.where(valid[..., None], kv, 0).double()
    scores = _products(q.double(), kv.transpose(1, 2)) * scale
    scores = scores.masked_fill(~valid[:, None], float("-inf"))
    rest = torch.full((q.shape[1],), float("-inf")) if sink is None else sink
    rest = rest.double()[None, :, None].expand(len(q), -1, 1)
    weights = torch.softmax(torch.cat([scores, rest], dim=-1), dim=-1)[..., :-1]
    return _products(torch.where(valid[:, None], weights, 0.0), kv[..., :d_v]).to(q.dtype)


def _up_to(indices: Tensor, length: Tensor | None) -> Tensor:
    """``indices`` [rows, keys], -1 from each row's ``length`` on."""
    if length is None:
        return indices.long()
    return indices.long().masked_fill(torch.arange(indices.shape[1]) >= length[:, None], -1)


def _by_rows(attend: Callable[[slice], Tensor], rows: int, like: Tensor) -> Tensor:
    parts = [attend(slice(start, start + _ROWS)) for start in range(0, rows, _ROWS)]
    return torch.cat(parts) if parts else like


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
    """Attention of each row over the rows of ``kv`` [n, 1, 512] it chose; statistics are not made.

    ``indices`` [rows, 1, topk], -1 for none; of row r only the first ``topk_length[r]`` count.
    """
    chosen = _up_to(indices[:, 0], topk_length)

    def part(rows: slice) -> Tensor:
        at = chosen[rows]
        return _attend(q[rows], kv[:, 0][at.clamp(min=0)], at >= 0, sm_scale, d_v, attn_sink)

    return _by_rows(part, len(q), q[..., :d_v]), None, None


def get_mla_metadata(*_: Any, **__: Any) -> tuple[None, None]:
    """A schedule over SMs, of which there are none."""
    return None, None


def flash_mla_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    block_table: None,
    cache_seqlens: None,
    head_dim_v: int,
    tile_scheduler_metadata: None,
    num_splits: None = None,
    softmax_scale: float | None = None,
    *,
    is_fp8_kvcache: bool = True,
    indices: Tensor,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None,
    extra_indices_in_kvcache: Tensor | None = None,
    extra_topk_length: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of ``q`` [rows, 1, heads, 512] over chosen slots of one or two latent caches.

    Caches are [pages, P, 1, 584], a view of the pages as the pool has them.
    """
    scale = LATENT**-0.5 if softmax_scale is None else softmax_scale
    sources = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None and extra_indices_in_kvcache is not None:
        sources.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))

    def part(rows: slice) -> Tensor:
        kv, valid = [], []
        for cache, chosen, length in sources:
            at = _up_to(chosen[rows, 0], None if length is None else length[rows])
            pages = cache.view(torch.uint8).flatten(1)
            kv.append(read_latent(pages, cache.shape[1], at.clamp(min=0)))
            valid.append(at >= 0)
        return _attend(q[rows, 0], torch.cat(kv, 1), torch.cat(valid, 1), scale, head_dim_v, attn_sink)

    return _by_rows(part, len(q), q[:, 0, :, :head_dim_v])[:, None], None


# --- hyper-connections --------------------------------------------------------------------------


def _gates(residual: Tensor, fn: Tensor, eps: float) -> Tensor:
    """``residual`` [rows, streams, hidden] by ``fn``, over its root mean square; [rows, gates], double."""
    x = residual.flatten(-2).double()
    return invariant_mm(x, fn.double().t()) * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@operator()
def _mhc_pre(
    residual: Tensor,
    fn: Tensor,
    scale: Tensor,
    base: Tensor,
    rms_eps: float,
    pre_eps: float,
    sinkhorn_eps: float,
    post_mult: float,
    repeat: int,
    norm_weight: Tensor | None,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    n = residual.shape[-2]
    mixes, scale, base = _gates(residual, fn, rms_eps), scale.double(), base.double()
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + pre_eps
    post = torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n]) * post_mult
    comb = torch.softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).unflatten(-1, (n, n)), dim=-1)
    comb = comb + sinkhorn_eps
    comb = comb / (comb.sum(1, keepdim=True) + sinkhorn_eps)
    for _ in range(repeat - 1):
        comb = comb / (comb.sum(2, keepdim=True) + sinkhorn_eps)
        comb = comb / (comb.sum(1, keepdim=True) + sinkhorn_eps)
    mixed = (pre[..., None] * residual.double()).sum(1)
    if norm_weight is not None:
        root = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + norm_eps)
        mixed = mixed.to(residual.dtype).double() * root * norm_weight.to(residual.dtype).double()
    return post.float()[..., None], comb.float(), mixed.to(residual.dtype)


def mhc_pre(
    residual: Tensor,
    fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    rms_eps: float,
    hc_pre_eps: float,
    hc_sinkhorn_eps: float,
    hc_post_mult_value: float,
    sinkhorn_repeat: int,
    n_splits: int = 1,
    n_splits_pre: int = 32,
    *,
    norm_weight: Tensor | None = None,
    norm_eps: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's input from the residual streams [rows, streams, hidden], and how to put it back.

    Gates of the streams for its output [rows, streams, 1], a doubly stochastic mixture of the
    streams [rows, streams, streams], and the input [rows, hidden], normed if there is a weight.
    """
    made: tuple[Tensor, Tensor, Tensor] = _mhc_pre(
        residual, fn, hc_scale, hc_base, rms_eps, hc_pre_eps, hc_sinkhorn_eps,
        hc_post_mult_value, sinkhorn_repeat, norm_weight, norm_eps or 0.0,
    )  # fmt: skip
    return made


@operator()
def _mhc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    mixed = (comb.double()[..., None] * residual.double()[:, :, None]).sum(1)
    return (post.double() * x.double()[:, None] + mixed).to(residual.dtype)


def mhc_post(x: Tensor, residual: Tensor, post_layer_mix: Tensor, comb_res_mix: Tensor) -> Tensor:
    """The streams after a block: mixed by ``comb_res_mix``, the block's output ``x`` gated in."""
    made: Tensor = _mhc_post(x, residual, post_layer_mix.view(*residual.shape[:2], 1), comb_res_mix)
    return made


@operator()
def _hc_head(x: Tensor, fn: Tensor, scale: Tensor, base: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    pre = torch.sigmoid(_gates(x, fn, norm_eps) * scale.double() + base.double()) + hc_eps
    return (pre[..., None] * x.double()).sum(1).to(x.dtype)


def fused_hc_head(x: Tensor, hc_fn: Tensor, hc_scale: Tensor, hc_base: Tensor, norm_eps: float, hc_eps: float) -> Tensor:
    """The streams [rows, streams, hidden] gated and added, for the head; [rows, hidden]."""
    made: Tensor = _hc_head(x, hc_fn, hc_scale, hc_base, norm_eps, hc_eps)
    return made
