"""The metadata of a DSV4 prefill, written by one kernel.

Contract. :meth:`Tables.write` gives what SGLang's builders give, bit by bit: the expansion by token, page tables,
window, compressed lengths and slots, compression plans; in one launch for about thirty. What captured kernels read goes
to its captured address, the rest into new tensors of the live batch's real rows and width. Plans have their entries in
the order of tokens, each in its token's row, where SGLang's are packed in the order in which threads come; kernels look
at each entry alone. The selection's schedules stay SGLang's.

It is a second implementation of what SGLang defines, so it has to prove itself at start: :func:`made_up` gives batches
over a pool of known contents, both build, :func:`difference` names the first field that differs. The owner then
keeps SGLang's builders. What releases decide differently, how many of a request's last states a plan keeps, is read
off SGLang's own plan. Not promised: a host whose tables differ only where no made-up batch goes.
"""

# mypy: disable-error-code="misc,no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sglang_bcg_dsa.buckets import align_up
from sglang_bcg_dsa.errors import MetadataError
from sglang_bcg_dsa.metadata import Policy

WINDOW = 128
"""Tokens of the sliding window: the host's ``SWA_WINDOW``."""
ALIGNED = 64
"""Columns of index tables come in multiples of it: the host's ``PAGE_INDEX_ALIGNED_SIZE``."""
_BLOCK = 1024
COPIED = ("positions_casual", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc")
"""What captured kernels read of the core metadata, in the kernel's order."""
PLANS = ("c4_compress_metadata", "c128_compress_metadata")
_LENGTHS = (
    "seq_lens_casual", "swa_topk_lengths", "c4_topk_lengths_raw", "c4_topk_lengths_clamp1", "c4_sparse_topk_lengths",
    "c128_topk_lengths_clamp1",
)  # fmt: skip
"""One number a row, in the order in which the kernel lays them."""
GIVEN = frozenset({
    "max_seq_len", "req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc", "num_tokens", "extend_seq_lens",
    "extend_seq_lens_cpu", "extend_start_loc", "need_compress", "use_prefill_cuda_graph", "forward_batch",
})  # fmt: skip
"""What SGLang's builder may be given for tables to be written here instead."""
_MADE_UP = 4
"""Requests of the largest batch that is made up."""
_FEW = 256
"""Rows of the batch with the longest context: 12 MB of tables at 1M."""
_SCALARS = (
    "requests", "tokens", "live", "token_stride", "pages", "columns", "topk", "pitch", "swa_page", "ring4", "ring128", "tail4",
    "tail128",
)  # fmt: skip
_POINTERS = (
    "pool_indices", "seq_lens", "extend_lens", "out_loc", "req_to_token", "full_to_swa", "positions", "swa_out", "c4_out",
    "c128_out", "plan4_c", "plan4_w", "plan128_c", "plan128_w", "lengths", "page_table", "window", "c128_slots", "c4_slots",
)  # fmt: skip


# Nothing is specialised on a batch: its sizes and addresses must not compile a kernel while serving.
@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def write_tables(
    pool_indices, seq_lens, extend_lens, out_loc, req_to_token, full_to_swa,
    positions, swa_out, c4_out, c128_out, plan4_c, plan4_w, plan128_c, plan128_w,
    lengths, page_table, window, c128_slots, c4_slots,
    requests, tokens, live, token_stride, pages, columns, topk, pitch, swa_page, ring4, ring128, tail4, tail128,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row of the bucket; rows from ``tokens`` on are padding, tables are made for the first ``live``."""
    row = tl.program_id(0)
    # The requests that end before this row; one without new tokens ends where it begins. One by one: a batch has few,
    # and Triton's interpreter, which tests run this with, has no sums.
    request, first, end = 0, 0, 0
    for index in range(requests):
        end += tl.load(extend_lens + index).to(tl.int32)
        over = end <= row
        request += over.to(tl.int32)
        first = tl.where(over, end, first)
    real = row < tokens
    request = tl.where(real, request, requests - 1)
    whole = tl.load(seq_lens + request).to(tl.int32)
    new = row - first + 1
    length = tl.where(real, whole - tl.load(extend_lens + request).to(tl.int32) + new, 1)
    last = length - 1
    holder = tl.load(pool_indices + request).to(tl.int64)
    slots = req_to_token + holder * token_stride
    place = tl.load(out_loc + row).to(tl.int64)

    tl.store(positions + row, last)
    tl.store(swa_out + row, tl.load(full_to_swa + place).to(tl.int32))
    tl.store(c4_out + row, tl.where(length % 4 == 0, place // 4, 0))
    tl.store(c128_out + row, tl.where(length % 128 == 0, place // 128, 0))

    # States of C4 lie by slot of the window, those of C128 by request; a group reads back what came in earlier batches.
    here = tl.load(full_to_swa + tl.load(slots + last, mask=real, other=0).to(tl.int64)).to(tl.int32)
    there = tl.load(full_to_swa + tl.load(slots + tl.maximum(last - 4, 0), mask=real, other=0).to(tl.int64)).to(tl.int32)
    state = here // swa_page * ring4 + here % ring4
    earlier = there // swa_page * ring4 + there % ring4
    missing = 8 - tl.minimum(new, 8)
    ends = real & (length % 4 == 0)
    reads = ends & (missing > 0)
    tl.store(plan4_c + row * 4, tl.where(ends, length, -1))
    tl.store(plan4_c + row * 4 + 1, tl.where(ends, row | (missing << 16), 0))
    tl.store(plan4_c + row * 4 + 2, tl.where(reads, earlier // 4, -1))
    tl.store(plan4_c + row * 4 + 3, tl.where(reads, state // 4, tl.where(ends, request, -1)))
    kept = real & ((last >= tl.minimum(whole // 4 * 4 - 4, whole - tail4)) | (last % swa_page >= swa_page - 4))
    tl.store(plan4_w + row * 2, tl.where(kept, row, -1))
    tl.store(plan4_w + row * 2 + 1, tl.where(kept, state, -1))

    ring = holder.to(tl.int32) * ring128
    missing = 128 - tl.minimum(new, 128)
    ends = real & (length % 128 == 0)
    reads = ends & (missing > 0)
    tl.store(plan128_c + row * 4, tl.where(ends, length, -1))
    tl.store(plan128_c + row * 4 + 1, tl.where(ends, row | (missing << 16), 0))
    tl.store(plan128_c + row * 4 + 2, tl.where(reads, (ring + tl.maximum(last - 128, 0) % ring128) // 128, -1))
    tl.store(plan128_c + row * 4 + 3, tl.where(reads, (ring + last % ring128) // 128, tl.where(ends, request, -1)))
    kept = real & (last >= tl.minimum(whole // 128 * 128, whole - tail128))
    tl.store(plan128_w + row * 2, tl.where(kept, row, -1))
    tl.store(plan128_w + row * 2 + 1, tl.where(kept, ring + last % ring128, -1))

    if row < live:
        groups = length // 4
        tl.store(lengths + row, length)
        tl.store(lengths + pitch + row, tl.minimum(length, WINDOW))
        tl.store(lengths + 2 * pitch + row, groups)
        tl.store(lengths + 3 * pitch + row, tl.maximum(groups, 1))
        tl.store(lengths + 4 * pitch + row, tl.minimum(tl.maximum(groups, 1), topk))
        tl.store(lengths + 5 * pitch + row, tl.maximum(length // 128, 1))

        wide = row.to(tl.int64)
        back = tl.arange(0, WINDOW)
        seen = tl.load(slots + last - back, mask=back < length, other=0).to(tl.int64)
        near = tl.load(full_to_swa + seen, mask=back < length, other=-1).to(tl.int32)
        tl.store(window + wide * WINDOW + back, near)
        for start in range(0, pages, BLOCK):
            page = start + tl.arange(0, BLOCK)
            begin = tl.load(slots + page.to(tl.int64) * PAGE, mask=page < pages, other=0)
            tl.store(page_table + wide * pages + page, begin // PAGE, mask=page < pages)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < length // 128
            begins = tl.load(slots + (column // (PAGE // 128)).to(tl.int64) * PAGE, mask=inside, other=0)
            slot = begins // PAGE * (PAGE // 128) + column % (PAGE // 128)
            tl.store(c128_slots + wide * columns + column, tl.where(inside, slot, -1), mask=column < columns)
        for start in range(0, topk, BLOCK):
            chosen = start + tl.arange(0, BLOCK)
            tl.store(c4_slots + wide * topk + chosen, tl.full([BLOCK], -1, tl.int32), mask=chosen < topk)


class Tables:
    """Writes the metadata of a batch over that of a capture."""

    def __init__(self, metadata: Any, pool: Any, make_schedule: Callable[[], Any], kernel: Any = write_tables) -> None:
        """``metadata``: what SGLang built for the first of :func:`made_up`'s batches.

        Raises MetadataError when it has other tensors than are written here.
        """
        core = metadata.core_attn_metadata
        self._make_schedule = make_schedule
        self._kernel = kernel
        given = {field.name for field in dataclasses.fields(core) if getattr(core, field.name, None) is not None}
        self._schedules = tuple(name for name in given if name.endswith("_flashmla_metadata"))
        tensors = {name for name in given if isinstance(getattr(core, name), torch.Tensor)}
        written = {*_LENGTHS, *COPIED, "raw_out_loc", "page_table", "swa_page_indices", "c128_page_indices",
                   "c4_sparse_page_indices", "c4_sparse_raw_indices"}  # fmt: skip
        if tensors != written:
            raise MetadataError(f"the kernel does not write {', '.join(sorted(tensors ^ written))} as this model has it")
        self._page: int = core.page_size
        self._topk: int = core.c4_sparse_page_indices.shape[1]
        self._swa_page = int(pool.swa_page_size)
        self._rings = tuple(int(pool.get_ring_size(compress_ratio=ratio)) for ratio in (4, 128))
        self._tails = tuple(_tail(getattr(metadata, name)) for name in PLANS)

    def write(
        self, over: Any, given: Mapping[str, Any], *, req_to_token: torch.Tensor, full_to_swa: torch.Tensor, live: int
    ) -> Any:
        """Metadata of the live batch, without the selection's, whose copied fields are ``over``'s tensors, refreshed.

        ``given``: what SGLang's builder is given (:data:`GIVEN`); ``live``: real rows. Raises MetadataError when it asks
        for more, or for rows that were not captured.
        """
        if asked := sorted(name for name, value in given.items() if value is not None and name not in GIVEN):
            raise MetadataError(f"DSV4 metadata is asked for with {', '.join(asked)}, which the kernel does not know")
        core, out_loc = over.core_attn_metadata, given["out_cache_loc"]
        rows, captured = out_loc.shape[0], core.positions_casual.shape[0]
        if rows != captured or live > rows:
            raise MetadataError(f"{live} real rows and {rows} targets do not fit the {captured} rows of the capture")
        pages = -(-given["max_seq_len"] // self._page)
        columns = align_up(pages * (self._page // 128), ALIGNED)
        pitch = align_up(live, ALIGNED)

        def table(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=out_loc.device)

        lengths = table(len(_LENGTHS), pitch)
        made, whole = copy.copy(core), copy.copy(over)
        whole.core_attn_metadata = made
        made.page_table, made.swa_page_indices = table(live, pages), table(live, WINDOW)
        made.c128_page_indices = table(live, columns)
        made.c4_sparse_page_indices, made.c4_sparse_raw_indices = table(live, self._topk), table(live, self._topk)
        self._kernel[(rows,)](
            # int64 in captures and converted decodes, int32 in prefills: one kernel for all, the one that was proven.
            given["req_pool_indices"], given["seq_lens"], given["extend_seq_lens"].to(torch.int32), out_loc,
            req_to_token, full_to_swa,
            *(getattr(core, name) for name in COPIED),
            *(part.view(torch.int32) for name in PLANS for part in getattr(over, name)[1:3]),
            lengths, made.page_table, made.swa_page_indices, made.c128_page_indices, made.c4_sparse_page_indices,
            len(given["req_pool_indices"]), given["num_tokens"], live, req_to_token.stride(0), pages, columns, self._topk, pitch,
            self._swa_page, *self._rings, *self._tails, PAGE=self._page, WINDOW=WINDOW, BLOCK=_BLOCK,
        )  # fmt: skip
        for name, row in zip(_LENGTHS, lengths.unbind(), strict=True):
            setattr(made, name, row[:live])
        made.raw_out_loc = out_loc[:live]
        for name in self._schedules:
            setattr(made, name, self._make_schedule())
        return whole


# ---------------------------------------------------------------------- the proof at start


@contextmanager
def made_up(batch: Any, req_to_token: torch.Tensor, full_to_swa: torch.Tensor) -> Iterator[list[tuple[Any, int]]]:
    """Batches like ``batch``, with their real rows, over pools whose contents are known until the end.

    No request may be in the pools.
    """
    draw = torch.Generator().manual_seed(1)
    # The mapping's last entry stands for "none".
    rows, places = len(batch.out_cache_loc), min(len(full_to_swa) - 1, 1 << 16)
    width = req_to_token.shape[1]
    slots = req_to_token[1 : 1 + _MADE_UP]
    kept = slots.clone(), full_to_swa[:places].clone()
    slots.copy_(torch.randint(0, places, slots.shape, generator=draw))
    full_to_swa[:places] = torch.randperm(places, generator=draw).to(full_to_swa)
    try:
        yield [
            (_like(batch, requests, torch.randint(0, places, (count,), generator=draw)), sum(new for _, new in requests))
            for requests, count in _requests(rows, width, len(slots))
        ]
    finally:
        slots.copy_(kept[0])
        full_to_swa[:places] = kept[1]


def _requests(rows: int, width: int, slots: int) -> list[tuple[list[tuple[int, int]], int]]:
    """(prefix, new tokens) of each request, and the rows of the bucket; nothing without ``slots``.

    First a full bucket that ends a group of both ratios, which shows how much a plan keeps; several requests with
    padding; one token each, for which SGLang plans by another path; and the longest context, in few rows: its tables
    have its width.
    """
    if not slots:
        return []
    full, few = min(rows, width // 128 * 128), min(rows, width, _FEW)
    mixed = [(0, rows // 4), (253, 3), (130, 1), (2045, rows // 3)]
    fitting = [(p, n) for p, n in mixed if n > 0 and p + n <= width]
    while fitting and (len(fitting) > slots or sum(n for _, n in fitting) > rows):
        fitting.pop()
    singles = [(p, 1) for p in (131, 3, 254, 0) if p < width][: min(slots, rows)]
    half = few // 2 + 1
    cases = ([(-full % 128, full)], rows), (fitting, rows), (singles, rows), ([(width - half, half)], few)
    return [(requests, count) for requests, count in cases if requests and sum(n for _, n in requests) <= count]


def _like(batch: Any, requests: list[tuple[int, int]], places: torch.Tensor) -> Any:
    made, device = copy.copy(batch), batch.seq_lens.device

    def like(values: list[int], tensor: torch.Tensor) -> torch.Tensor:
        return torch.tensor(values, dtype=tensor.dtype, device=device)

    new, total = [n for _, n in requests], [p + n for p, n in requests]
    made.batch_size = len(requests)
    made.req_pool_indices = like(list(range(1, len(requests) + 1)), batch.req_pool_indices)
    made.seq_lens, made.seq_lens_cpu = like(total, batch.seq_lens), torch.tensor(total)
    made.extend_seq_lens, made.extend_seq_lens_cpu = like(new, batch.extend_seq_lens), new
    made.extend_start_loc = like([sum(new[:i]) for i in range(len(new))], batch.extend_seq_lens)
    made.out_cache_loc = places.to(batch.out_cache_loc)
    return made


def blank(metadata: Any) -> Any:
    """Metadata with tensors of its own, zeroed: what a capture would hold."""
    made, core = copy.copy(metadata), copy.copy(metadata.core_attn_metadata)
    made.core_attn_metadata = core
    for name in COPIED:
        setattr(core, name, torch.zeros_like(getattr(core, name)))
    for name in PLANS:
        plan = getattr(metadata, name)
        setattr(made, name, plan._replace(plan_c=torch.zeros_like(plan.plan_c), plan_w=torch.zeros_like(plan.plan_w)))
    return made


def difference(ours: Any, host: Any, policies: Mapping[str, Any]) -> str | None:
    """The first field that differs, or None. Waits for the device. ``policies``: of core metadata's fields."""
    for name in PLANS:
        one, other = getattr(ours, name), getattr(host, name)
        if one.compress_ratio != other.compress_ratio:
            return f"{name}.compress_ratio"
        for part in ("plan_c", "plan_w"):
            if not torch.equal(_entries(getattr(one, part)), _entries(getattr(other, part))):
                return f"{name}.{part}"
    ours, host = ours.core_attn_metadata, host.core_attn_metadata
    for field in dataclasses.fields(host):
        one, other = getattr(ours, field.name, None), getattr(host, field.name, None)
        if field.name == "c4_sparse_raw_indices":  # selection fills it; both leave it as it comes
            same = getattr(one, "shape", None) == getattr(other, "shape", None)
        elif isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            same = one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        elif policies.get(field.name) is Policy.EQUAL:
            same = bool(one == other)
        else:
            same = type(one) is type(other)
        if not same:
            return field.name
    return None


def _entries(plan: torch.Tensor) -> torch.Tensor:
    """A plan's entries as int32, by token; entries for no token (-1) last. Their count is the plan's own."""
    words = plan.view(torch.int32).cpu()
    token = words[:, 1] & 0xFFFF if words.shape[1] == 4 else words[:, 0]
    return words[torch.where(words[:, 0] == -1, 1 << 16, token).argsort(stable=True)]


def _tail(plan: Any) -> int:
    """How many of the last tokens of a single request keep their state. Waits for the device.

    Raises MetadataError when all do: a longer request might keep more.
    """
    tokens = {token for token, _ in plan.plan_w.view(torch.int32).tolist() if token != -1}
    if tokens and len(tokens) == max(tokens) + 1:
        raise MetadataError(f"a plan keeps all of {len(tokens)} tokens; the largest bucket is too small to see how many it would")
    return next(n for n in range(len(plan.plan_w) + 1) if max(tokens, default=-1) - n not in tokens)
