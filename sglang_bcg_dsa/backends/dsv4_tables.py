"""The tables of a DSV4 prefill, written by one kernel.

Contract. :meth:`Tables.write` gives what SGLang's builders of the core metadata give, bit by bit: the expansion by
token, page tables, window, compressed lengths and slots; in one launch for about twenty. What captured kernels read
goes to its captured address, the rest into new tensors of the live batch's real rows and width. Compression plans
and schedules stay SGLang's: their rules differ between releases.

It is a second implementation of what SGLang defines, so it has to prove itself at start: :func:`made_up` gives batches
over a pool of known contents, both build, :func:`difference` names the first field that differs. The owner then
keeps SGLang's builders. Not promised: a host whose tables differ only where no made-up batch goes.
"""

# mypy: disable-error-code="misc,no-untyped-call,no-untyped-def,untyped-decorator"
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from sglang_bcg_dsa.errors import MetadataError
from sglang_bcg_dsa.metadata import Policy

WINDOW = 128
"""Tokens of the sliding window: the host's ``SWA_WINDOW``."""
ALIGNED = 64
"""Columns of index tables come in multiples of it: the host's ``PAGE_INDEX_ALIGNED_SIZE``."""
_BLOCK = 1024
_LENGTHS = (
    "seq_lens_casual", "swa_topk_lengths", "c4_topk_lengths_raw", "c4_topk_lengths_clamp1", "c4_sparse_topk_lengths",
    "c128_topk_lengths_clamp1",
)  # fmt: skip
"""One number a row, in the order in which the kernel lays them."""
GIVEN = frozenset({"req_to_token", "req_pool_indices_repeated", "seq_lens_casual", "max_seq_len", "out_loc", "need_compress",
                   "is_prefill", "num_groups"})  # fmt: skip
"""What SGLang's builder of core metadata may be given; ``num_groups`` shapes what only rings have."""
_MADE_UP = 4
"""Requests of the largest batch that is made up."""
_SCALARS = ("requests", "tokens", "live", "token_stride", "pages", "columns", "topk", "pitch")
_POINTERS = (
    "pool_indices", "seq_lens", "extend_lens", "out_loc", "req_to_token", "full_to_swa", "positions", "swa_out", "c4_out",
    "c128_out", "lengths", "page_table", "window", "c128_slots", "c4_slots",
)  # fmt: skip


# Nothing is specialised on a batch: its sizes and addresses must not compile a kernel while serving.
@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=_POINTERS)
def write_tables(
    pool_indices, seq_lens, extend_lens, out_loc, req_to_token, full_to_swa,
    positions, swa_out, c4_out, c128_out,
    lengths, page_table, window, c128_slots, c4_slots,
    requests, tokens, live, token_stride, pages, columns, topk, pitch,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program a row of the bucket; rows below ``tokens`` are padding, tables are made for the first ``live``."""
    row = tl.program_id(0)
    # The requests that end before this row; one without new tokens ends where it begins. One by one: a batch has few,
    # and Triton's interpreter, which tests run this with, has no sums.
    request, first, end = 0, 0, 0
    for index in range(requests):
        end += tl.load(extend_lens + index).to(tl.int32)
        over = end <= row
        request += over.to(tl.int32)
        first = tl.where(over, end, first)
    request = tl.where(row < tokens, request, requests - 1)
    prefix = tl.load(seq_lens + request).to(tl.int32) - tl.load(extend_lens + request).to(tl.int32)
    length = tl.where(row < tokens, prefix + row - first + 1, 1)
    place = tl.load(out_loc + row).to(tl.int64)

    tl.store(positions + row, length - 1)
    tl.store(swa_out + row, tl.load(full_to_swa + place).to(tl.int32))
    tl.store(c4_out + row, tl.where(length % 4 == 0, place // 4, 0))
    tl.store(c128_out + row, tl.where(length % 128 == 0, place // 128, 0))
    if row < live:
        groups = length // 4
        tl.store(lengths + row, length)
        tl.store(lengths + pitch + row, tl.minimum(length, WINDOW))
        tl.store(lengths + 2 * pitch + row, groups)
        tl.store(lengths + 3 * pitch + row, tl.maximum(groups, 1))
        tl.store(lengths + 4 * pitch + row, tl.minimum(tl.maximum(groups, 1), topk))
        tl.store(lengths + 5 * pitch + row, tl.maximum(length // 128, 1))

        wide = row.to(tl.int64)
        slots = req_to_token + tl.load(pool_indices + request).to(tl.int64) * token_stride
        back = tl.arange(0, WINDOW)
        seen = tl.load(slots + length - 1 - back, mask=back < length, other=0).to(tl.int64)
        near = tl.load(full_to_swa + seen, mask=back < length, other=-1).to(tl.int32)
        tl.store(window + wide * WINDOW + back, near)
        for start in range(0, pages, BLOCK):
            page = start + tl.arange(0, BLOCK)
            begin = tl.load(slots + page.to(tl.int64) * PAGE, mask=page < pages, other=0)
            tl.store(page_table + wide * pages + page, begin // PAGE, mask=page < pages)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = column < length // 128
            holder = tl.load(slots + (column // (PAGE // 128)).to(tl.int64) * PAGE, mask=there, other=0)
            slot = holder // PAGE * (PAGE // 128) + column % (PAGE // 128)
            tl.store(c128_slots + wide * columns + column, tl.where(there, slot, -1), mask=column < columns)
        for start in range(0, topk, BLOCK):
            chosen = start + tl.arange(0, BLOCK)
            tl.store(c4_slots + wide * topk + chosen, tl.full([BLOCK], -1, tl.int32), mask=chosen < topk)


class Requests(NamedTuple):
    """The requests of a batch, by tensors of one entry each, and how many tokens are new in all."""

    pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    extend_lens: torch.Tensor
    tokens: int


class Tables:
    """Writes the core metadata of a batch over that of a capture."""

    def __init__(self, core: Any, make_schedule: Callable[[], Any], kernel: Any = write_tables) -> None:
        """``core``: core metadata that SGLang built. Raises MetadataError when its tensors are not those written here."""
        self._make_schedule = make_schedule
        self._kernel = kernel
        given = {field.name for field in dataclasses.fields(core) if getattr(core, field.name, None) is not None}
        self._schedules = tuple(name for name in given if name.endswith("_flashmla_metadata"))
        tensors = {name for name in given if isinstance(getattr(core, name), torch.Tensor)}
        written = {*_LENGTHS, "positions_casual", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc", "raw_out_loc", "page_table",
                   "swa_page_indices", "c128_page_indices", "c4_sparse_page_indices", "c4_sparse_raw_indices"}  # fmt: skip
        if tensors != written:
            raise MetadataError(f"the kernel does not write {', '.join(sorted(tensors ^ written))} as this model has it")
        self._page: int = core.page_size
        self._topk: int = core.c4_sparse_page_indices.shape[1]

    def write(self, core: Any, batch: Requests, *, req_to_token: torch.Tensor, full_to_swa: torch.Tensor, out_loc: torch.Tensor,
              width: int, live: int) -> Any:  # fmt: skip
        """Metadata of the live batch whose copied fields are ``core``'s own tensors, refreshed.

        ``out_loc`` ``[bucket]``: where each token is stored; ``width``: tokens of the longest request; ``live``: real rows.
        """
        rows, captured = out_loc.shape[0], core.positions_casual.shape[0]
        if rows != captured or live > rows:
            raise MetadataError(f"{live} real rows and {rows} targets do not fit the {captured} rows of the capture")
        made = copy.copy(core)
        pages = -(-width // self._page)
        columns = _aligned(pages * (self._page // 128))
        pitch = _aligned(live)

        def table(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=out_loc.device)

        lengths = table(len(_LENGTHS), pitch)
        made.page_table, made.swa_page_indices = table(live, pages), table(live, WINDOW)
        made.c128_page_indices = table(live, columns)
        made.c4_sparse_page_indices, made.c4_sparse_raw_indices = table(live, self._topk), table(live, self._topk)
        self._kernel[(rows,)](
            batch.pool_indices, batch.seq_lens, batch.extend_lens, out_loc, req_to_token, full_to_swa,
            core.positions_casual, core.swa_out_cache_loc, core.c4_out_loc, core.c128_out_loc,
            lengths, made.page_table, made.swa_page_indices, made.c128_page_indices, made.c4_sparse_page_indices,
            len(batch.pool_indices), batch.tokens, live, req_to_token.stride(0), pages, columns, self._topk, pitch,
            PAGE=self._page, WINDOW=WINDOW, BLOCK=_BLOCK,
        )  # fmt: skip
        for name, row in zip(_LENGTHS, lengths.unbind(), strict=True):
            setattr(made, name, row[:live])
        made.raw_out_loc = out_loc[:live]
        for name in self._schedules:
            setattr(made, name, self._make_schedule())
        return made


def _aligned(columns: int) -> int:
    return -(-columns // ALIGNED) * ALIGNED


# ---------------------------------------------------------------------- the proof at start


@contextmanager
def made_up(batch: Any, req_to_token: torch.Tensor, full_to_swa: torch.Tensor) -> Iterator[list[tuple[Any, int]]]:
    """Batches like ``batch``, with their real rows, over pools whose contents are known until the end.

    No request may be in the pools.
    """
    draw = torch.Generator().manual_seed(1)
    # The last entry of the mapping stands for "none".
    rows, places = len(batch.out_cache_loc), min(len(full_to_swa) - 1, 1 << 16)
    width = req_to_token.shape[1]
    slots = req_to_token[1 : 1 + _MADE_UP]
    kept = slots.clone(), full_to_swa[:places].clone()
    slots.copy_(torch.randint(0, places, slots.shape, generator=draw))
    full_to_swa[:places] = torch.randperm(places, generator=draw).to(full_to_swa)
    try:
        yield [
            (_like(batch, requests, torch.randint(0, places, (rows,), generator=draw)), sum(new for _, new in requests))
            for requests in _requests(rows, width, len(slots))
        ]
    finally:
        slots.copy_(kept[0])
        full_to_swa[:places] = kept[1]


def _requests(rows: int, width: int, slots: int) -> list[list[tuple[int, int]]]:
    """(prefix, new tokens) of each request: a full bucket, one of several requests with padding, the longest context."""
    mixed = [(0, rows // 4), (253, 3), (130, 1), (2045, rows // 3)]
    fitting = [(p, n) for p, n in mixed if n > 0 and p + n <= width]
    while fitting and (len(fitting) > slots or sum(n for _, n in fitting) > rows):
        fitting.pop()
    cases = [[(0, min(rows, width))], fitting, [(width - min(rows, width) // 2 - 1, min(rows, width) // 2 + 1)]]
    return [case for case in cases if case]


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


def blank(core: Any) -> Any:
    """Core metadata with tensors of its own, zeroed: what a capture would hold."""
    made = copy.copy(core)
    for name in ("positions_casual", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc"):
        setattr(made, name, torch.zeros_like(getattr(core, name)))
    return made


def difference(ours: Any, host: Any, policies: Mapping[str, Any]) -> str | None:
    """The first field of core metadata that differs, or None. Waits for the device."""
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
