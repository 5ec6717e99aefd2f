"""The CPU kernels for DeepSeek-V4 against formulas written out number by number."""

from __future__ import annotations

import cmath
import math
import struct
from types import SimpleNamespace
from typing import NamedTuple

import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_bcg_dsa import rehearse, traffic  # noqa: E402
from sglang_bcg_dsa.testing import dsa_kernels, dsv4_kernels, dsv4_overrides  # noqa: E402
from sglang_bcg_dsa.testing.models import INDEX_TOPK, VOCABULARY  # noqa: E402
from sglang_bcg_dsa.testing.tape import TapeGraph  # noqa: E402

SEEDS = st.integers(0, 2**31)
FEW = settings(max_examples=10, deadline=None)
EPS = 1e-6
FREQS = torch.polar(torch.ones(64, 32), torch.outer(torch.arange(64.0), 0.9 ** torch.arange(32)))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def normed(row: list[float], weight: list[float] | None = None) -> list[float]:
    root = math.sqrt(math.fsum(x * x for x in row) / len(row) + EPS)
    return [x / root * w for x, w in zip(row, weight or [1.0] * len(row), strict=True)]


def turned(row: list[float], position: int, sign: int = 1) -> list[float]:
    """The last 64 numbers, pair by pair, turned by the position's angles."""
    out = list(row)
    for pair in range(32):
        at = len(row) - 64 + 2 * pair
        z = complex(row[at], row[at + 1]) * cmath.exp(1j * sign * float(FREQS[position, pair].angle()))
        out[at : at + 2] = [z.real, z.imag]
    return out


# --- norms and rotation -------------------------------------------------------------------------


@FEW
@given(seed=SEEDS, positions=st.lists(st.integers(0, 63), min_size=1, max_size=3))
def test_queries_are_normed_by_head_and_turned(seed: int, positions: list[int]) -> None:
    """Each head is divided by its root mean square; its last 64 turn; an inverse turn undoes that."""
    q, at = noise(seed, len(positions), 2, 512), torch.tensor(positions)
    out = torch.empty_like(q)
    dsv4_kernels.fused_q_norm_rope(q, out, EPS, FREQS, at)
    for row, position in enumerate(positions):
        for head in range(2):
            wanted = turned(normed(q[row, head].tolist()), position)
            assert out[row, head].tolist() == pytest.approx(wanted, abs=1e-5)
    dsv4_kernels.fused_rope_inplace(out[..., -64:], None, FREQS, at, inverse=True)
    assert out[0, 0].tolist() == pytest.approx(normed(q[0, 0].tolist()), abs=1e-5)


# --- the latent cache ---------------------------------------------------------------------------


def latent(cache: torch.Tensor, page_size: int, slot: int) -> list[float]:
    """A slot's 512 numbers, read byte by byte."""
    raw = bytes(cache[slot // page_size].tolist())
    at = slot % page_size
    body, scales = raw[at * 576 : at * 576 + 576], raw[page_size * 576 + at * 8 :][:8]
    fp8 = torch.tensor(list(body[:448]), dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist()
    nope = [x * 2.0 ** (scales[i // 64] - 127) for i, x in enumerate(fp8)]
    rope = [struct.unpack("<f", b"\0\0" + body[448 + 2 * i : 450 + 2 * i])[0] for i in range(64)]
    return [*nope, *rope]


def close(got: list[float], wanted: list[float]) -> None:
    """By 64: within half a step of FP8 at the least power of two that holds them; the last 64 in bfloat16."""
    for tile in range(7):
        part = wanted[tile * 64 : tile * 64 + 64]
        step = 2.0 ** math.ceil(math.log2(max(max(map(abs, part)), 1e-4) / 448) - 1e-6)
        for a, b in zip(got[tile * 64 : tile * 64 + 64], part, strict=True):
            assert abs(a - b) <= max(abs(b) * 2**-4, step * 2**-10) * 1.1, (a, b, step)
    assert got[448:] == pytest.approx(wanted[448:], rel=2**-8, abs=1e-30)


@FEW
@given(seed=SEEDS, slots=st.lists(st.integers(0, 31), min_size=1, max_size=6, unique=True), size=st.floats(1e-6, 1e4))
def test_latent_rows_lie_where_the_pool_says(seed: int, slots: list[int], size: float) -> None:
    """Norm, turn, quantize, store: found again byte by byte; -1 stores nothing; dequantizing is exact."""
    cache = torch.zeros(4, -(-8 * 584 // 576) * 576, dtype=torch.uint8)
    rows = len(slots) + 1
    kv, weight = noise(seed, rows, 512) * size, noise(seed + 1, 512)
    at = torch.arange(rows)
    dsv4_kernels.fused_k_norm_rope_flashmla(kv, weight, EPS, FREQS, at, torch.tensor([-1, *slots], dtype=torch.int32), cache, 8)
    for row, slot in enumerate(slots, 1):
        close(latent(cache, 8, slot), turned(normed(kv[row].tolist(), weight.tolist()), row))
    untouched = [slot for slot in range(32) if slot not in slots]
    assert all(latent(cache, 8, slot) == [0.0] * 512 for slot in untouched)
    out = dsv4_kernels.dequantize_k_cache_paged(cache, torch.tensor(slots), 8)
    for row, slot in enumerate(slots):
        exact = torch.tensor(latent(cache, 8, slot)).to(torch.bfloat16)
        assert torch.equal(out[row, 0], exact)


@pytest.mark.parametrize(("largest", "exponent"), [(448.0, 0), (448.5, 1), (224.0, -1), (1792.0, 2), (1e-9, -22)])
def test_a_scale_is_the_least_power_of_two(largest: float, exponent: int) -> None:
    """No smaller one holds the tile's largest value; an exact power is itself; tiny tiles have a floor."""
    cache, kv = torch.zeros(1, 9 * 576, dtype=torch.uint8), torch.zeros(1, 512)
    kv[0, 0] = 1.0
    weight = torch.full((512,), largest / math.sqrt(512))
    dsv4_kernels.fused_k_norm_rope_flashmla(
        kv, weight, 0.0, FREQS, torch.tensor([0]), torch.tensor([0]).int(), cache, 8
    )  # fmt: skip
    assert int(cache[0, 8 * 576]) == 127 + exponent


# --- the compressor -----------------------------------------------------------------------------


class Plan(NamedTuple):
    compress_ratio: int
    c: torch.Tensor
    w: torch.Tensor | None = None

    @property
    def is_decode(self) -> bool:
        return self.w is None


def group(scored: list[list[float]], end: int, ratio: int, ape: list[list[float]]) -> list[float]:
    """The compressed row of the group that ends before ``end``, from all rows of the request."""
    dim = len(ape[0])
    out = []
    for channel in range(dim):
        terms = []
        for j, bias in enumerate(ape):
            position = end - len(ape) + j
            if position < 0:
                continue
            row = scored[position]
            if ratio == 4:
                early = j < 4
                value, score = row[channel + (0 if early else dim)], row[channel + (2 if early else 3) * dim]
            else:
                value, score = row[channel], row[channel + dim]
            terms.append((score + bias[channel], value))
        top = max(score for score, _ in terms)
        weight = math.fsum(math.exp(score - top) for score, _ in terms)
        out.append(math.fsum(math.exp(score - top) * value for score, value in terms) / weight)
    return out


@settings(max_examples=15, deadline=None)
@given(
    ratio=st.sampled_from([4, 128]),
    seed=SEEDS,
    padded=st.booleans(),
    chunks=st.lists(st.integers(1, 200), min_size=1, max_size=3),
    decodes=st.integers(0, 9),
)
@example(ratio=4, seed=0, padded=True, chunks=[1, 2, 1, 3, 1], decodes=6)
@example(ratio=128, seed=0, padded=True, chunks=[100, 27, 1, 127], decodes=2)
@example(ratio=4, seed=32, padded=False, chunks=[129, 119], decodes=9)
def test_groups_do_not_depend_on_how_a_prompt_is_cut(
    ratio: int, seed: int, padded: bool, chunks: list[int], decodes: int
) -> None:
    """Two requests, in chunks and then token by token: each group is the formula over its whole request."""
    dim, swa, ring = 4, 128, 8 if ratio == 4 else 128
    total = sum(chunks) + decodes
    columns = dim * (4 if ratio == 4 else 2)
    scored = noise(seed, 2, total, columns)
    ape = noise(seed + 1, 8 if ratio == 4 else 128, dim)
    pages = torch.randperm(8 * (total // swa + 1), generator=torch.Generator().manual_seed(seed))
    to_slot = torch.stack([pages[i * (total // swa + 1) :][: total // swa + 1] for i in range(2)])
    to_slot = (to_slot[..., None] * swa + torch.arange(swa)).flatten(1)[:, :total].int()
    slots = torch.arange(len(pages) * swa)
    to_state = slots.flip(0) // swa * swa + slots % swa
    state = torch.full((len(pages) * swa // ratio + 4, ratio, columns), float("nan"))
    where = dict(req_to_token=to_slot, full_to_state=to_state, swa_page_size=swa, ring_size=ring)
    requests = torch.tensor([1, 0])
    seen: dict[tuple[int, int], list[float]] = {}

    start = 0
    for new in chunks:
        end = torch.tensor([start + new] * 2)
        rows = 2 * new + 5
        made = dsv4_kernels.prefill_plans(
            ratio, requests, end, torch.tensor([new] * 2), num_q_tokens=rows, padded=padded, **where
        )
        plan = Plan(ratio, *made)
        if padded:
            assert plan.c.shape == (rows, 16) and plan.w is not None and plan.w.shape == (rows, 8)
        batch = torch.cat([scored[1, start : start + new], scored[0, start : start + new], noise(9, 5, columns)])
        out = dsv4_kernels.compress_forward(state, batch, ape, plan, head_dim=dim, compress_ratio=ratio)
        for row, (length, packed, _, _) in zip(out.tolist(), plan.c.view(torch.int32).tolist(), strict=True):
            if length == -1:
                assert all(map(math.isnan, row)), "a row without a plan is not defined"
            else:
                seen[int((packed & 0xFFFF) < new), length] = row
        start += new
    for length in range(start + 1, total + 1):
        plan = Plan(ratio, dsv4_kernels.decode_plans(ratio, requests, seq_lens=torch.tensor([length] * 2), **where))
        out = dsv4_kernels.compress_forward(state, scored[[1, 0], length - 1], ape, plan, head_dim=dim, compress_ratio=ratio)
        for row, request in zip(out.tolist(), (1, 0), strict=True):
            if length % ratio == 0:
                seen[request, length] = row
    ends = range(ratio, total + 1, ratio)
    assert set(seen) == {(request, end) for request in (0, 1) for end in ends}
    for (request, end), row in seen.items():
        assert row == pytest.approx(group(scored[request].tolist(), end, ratio, ape.tolist()), abs=1e-5)


@FEW
@given(seed=SEEDS, decode=st.booleans())
def test_compressed_rows_are_stored_where_their_last_token_goes(seed: int, decode: bool) -> None:
    """Latent and index rows, normed and turned by the group's first position; no plan, no store."""
    plans = torch.tensor([[8, 0, 0, 0], [7, 0, 0, 0], [4, 0, 0, 0]] if decode else [[8, 2, 0, 0], [-1, 0, -1, -1], [4, 5, 0, 0]])
    plan = Plan(4, plans.int().view(torch.uint8), None if decode else torch.empty(0, 8, dtype=torch.uint8))
    out_loc = torch.tensor([9, 3, 5] if decode else [3, 3, 9, 3, 3, 5])
    for dim, page_bytes in ((512, 9 * 576), (128, 8 * 132)):
        kv, weight = noise(seed, 3, dim), noise(seed + 1, dim)
        cache = torch.zeros(2, page_bytes, dtype=torch.uint8)
        dsv4_kernels.compress_norm_rope_store(
            kv, plan, norm_weight=weight, norm_eps=EPS, freq_cis=FREQS, out_loc=out_loc, kvcache=cache, page_size=8
        )
        raw = [bytes(page) for page in cache.tolist()]
        for row, slot, position in ((0, 9, 4), (2, 5, 0)):
            wanted = turned(normed(kv[row].tolist(), weight.tolist()), position)
            if dim == 512:
                close(latent(cache, 8, slot), wanted)
                continue
            spun = [sum(x * (-1) ** (i & j).bit_count() for i, x in enumerate(wanted)) / 128**0.5 for j in range(128)]
            (scale,) = struct.unpack("<f", raw[slot // 8][8 * 128 + 4 * (slot % 8) :][:4])
            assert scale == pytest.approx(max(map(abs, spun)) / 448, rel=1e-5)
            body = torch.tensor(list(raw[slot // 8][slot % 8 * 128 :][:128]), dtype=torch.uint8)
            got = (body.view(torch.float8_e4m3fn).float() * scale).tolist()
            assert all(abs(a - b) <= max(abs(b) * 2**-4, scale * 2**-10) * 1.01 for a, b in zip(got, spun, strict=True))
        slot_3 = raw[0][3 * 576 : 4 * 576] if dim == 512 else raw[0][3 * 128 : 4 * 128]
        assert not any(slot_3), "a row that ends no group was stored"


# --- selection and metadata ---------------------------------------------------------------------


@FEW
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 200), min_size=1, max_size=4))
@example(seed=0, lengths=[0, 64, 65, 200])
def test_selection_gives_slots_of_the_best_in_order(seed: int, lengths: list[int]) -> None:
    """All positions where they fit, else the 64 best, ascending, by the page table; then -1."""
    scores = noise(seed, len(lengths), 256).round(decimals=1)
    for row, length in enumerate(lengths):
        scores[row, length:] = float("nan")
    table = torch.randint(0, 99, (len(lengths), 4), dtype=torch.int32, generator=torch.Generator().manual_seed(seed))
    slots, raw = (torch.full((len(lengths), 64), 7, dtype=torch.int32) for _ in range(2))
    dsv4_kernels.topk_transform_512(scores, torch.tensor(lengths), table, slots, 64, raw)
    for row, length in enumerate(lengths):
        best = sorted(range(length), key=lambda i: (-float(scores[row, i]), i))[:64]
        wanted = sorted(best)
        rest = [-1] * (64 - len(wanted))
        assert raw[row].tolist() == [*wanted, *rest]
        assert slots[row].tolist() == [*(int(table[row, i // 64]) * 64 + i % 64 for i in wanted), *rest]


@FEW
@given(seed=SEEDS, lengths=st.lists(st.integers(0, 64), min_size=1, max_size=4), again=st.integers(1, 3))
def test_paged_scores_of_many_rows_are_the_formula(seed: int, lengths: list[int], again: int) -> None:
    """Several rows of a request, several requests, padding: each row's scores are those of it alone."""
    rows = [length for length in lengths for _ in range(again)]
    q = noise(seed, len(rows), 1, 2, 128).to(torch.float8_e4m3fn)
    weights = noise(seed + 1, len(rows), 2)
    keys, scale = noise(seed + 2, 3 * 64, 128).to(torch.float8_e4m3fn), noise(seed + 3, 3 * 64).abs()
    cache = torch.cat([keys.view(torch.uint8).view(3, -1), scale.view(3, 64).view(torch.uint8).view(3, -1)], 1)
    table = torch.tensor([[i % 3] for i in range(len(lengths)) for _ in range(again)])
    got = dsa_kernels.fp8_paged_mqa_logits(
        q, cache.view(3, 64, 1, 132), weights, torch.tensor(rows)[:, None], table, torch.empty(0), 64
    )
    for row, length in enumerate(rows):
        for column in range(64):
            if column >= length:
                assert math.isnan(got[row, column])
                continue
            slot = int(table[row, 0]) * 64 + column
            products = (q[row, 0].double() @ keys[slot].double()).clamp(min=0)
            assert float(got[row, column]) == pytest.approx(float(products @ weights[row].double() * scale[slot]), rel=1e-6)


def test_hashed_experts_are_those_of_the_token() -> None:
    """A token's id chooses; its logits only weigh, and the weights add up to one."""
    logits, table = noise(0, 3, 5).bfloat16(), torch.tensor([[0, 4], [2, 1], [3, 0]]).int()
    weights, ids = dsv4_kernels.hash_topk(logits, torch.tensor([2, 0, 2]), table)
    assert ids.tolist() == [[3, 0], [0, 4], [3, 0]] and weights.dtype == torch.float32
    for row in range(3):
        scores = [math.sqrt(math.log1p(math.exp(float(logits[row, i])))) for i in ids[row].tolist()]
        assert weights[row].tolist() == pytest.approx([s / sum(scores) for s in scores])


def test_compression_metadata_row_by_row() -> None:
    """Where a row's group goes (0: none ends here), where it begins, how many there are, and their slots."""
    lengths = torch.tensor([1, 4, 127, 128, 260])
    table = torch.tensor([[3, 5]] * 5)
    made = dsv4_kernels.init_compression_metadata(lengths, lengths - 1, lengths * 1000, table, 256)
    for at, ratio in ((0, 4), (4, 128)):
        for row, length in enumerate(lengths.tolist()):
            wanted = (length * 1000 // ratio if length % ratio == 0 else 0, (length - 1) // ratio * ratio, length // ratio)
            assert tuple(int(made[at + i][row]) for i in range(3)) == wanted
            assert int(made[at + 3][row]) == max(length // ratio, 1)
    assert made[0].dtype == torch.int64 and {made[i].dtype for i in (1, 2, 3, 8)} == {torch.int32}
    assert made[8].tolist() == [[-1] * 4, [-1] * 4, [-1] * 4, [6, -1, -1, -1], [6, 7, -1, -1]]


# --- attention ----------------------------------------------------------------------------------


def plain(q: torch.Tensor, keys: list[list[float]], sink: float) -> list[float]:
    scores = [math.fsum(a * b for a, b in zip(q.tolist(), key, strict=True)) * 0.25 for key in keys]
    top = max([*scores, sink])
    weights = [math.exp(score - top) for score in scores]
    total = math.fsum([*weights, math.exp(sink - top)])
    return [math.fsum(w * key[i] for w, key in zip(weights, keys, strict=True)) / total for i in range(512)]


@settings(max_examples=5, deadline=None)
@given(seed=SEEDS, news=st.lists(st.integers(1, 3), min_size=1, max_size=2), before=st.integers(0, 5))
def test_both_attentions_see_the_window_and_the_chosen_groups(seed: int, news: list[int], before: int) -> None:
    """The workspace's rows and the caches' slots give each query what it sees, with a sink, and nothing else."""
    window, topk, page_size = 4, 2, 8
    bytes_ = -(-page_size * 584 // 576) * 576
    swa, extra = (torch.zeros(4, bytes_, dtype=torch.uint8) for _ in range(2))
    for i, cache in enumerate((swa, extra)):
        dsv4_kernels.fused_k_norm_rope_flashmla(
            noise(seed + i, 32, 512), torch.ones(512), EPS, FREQS, torch.arange(32), torch.arange(32).int(), cache, page_size
        )
        # What padding left in slot 0 must not be seen where nothing was chosen.
        cache[0, 448:576] = 255
    ends = torch.tensor([before + new for new in news], dtype=torch.int32)
    slots = torch.arange(1, 31).view(3, 10).int()
    to_swa = torch.arange(32).flip(0)
    to_swa[31] = 31
    requests = torch.arange(len(news), dtype=torch.int32)
    ids, first, count, offsets = dsv4_kernels.build_swa_token_ids(
        ends, torch.tensor(news, dtype=torch.int32), requests, slots, to_swa, window
    )
    assert (first + count).tolist() == ends.tolist() and offsets[-1] == len(ids)
    rows = sum(news)
    chosen = torch.tensor([[1, 0]] * rows, dtype=torch.int32)
    groups = torch.tensor([[2 + 3 * i, 3 + 3 * i] for i in range(len(news))])
    starts = torch.nn.functional.pad(torch.tensor(news).cumsum(0), (1, 0)).int()
    table, lengths = dsv4_kernels.combine_topk_swa_indices(
        chosen, starts, ends, count, requests * 2, 2 * len(news) + offsets[:-1], window, 2, topk
    )
    space = torch.cat(
        [dsv4_kernels.dequantize_k_cache_paged(extra, groups.flatten(), page_size),
         dsv4_kernels.dequantize_k_cache_paged(swa, ids, page_size)]
    )  # fmt: skip
    q, sink = noise(seed + 2, rows, 2, 512), noise(seed + 3, 2)
    got, _, _ = dsv4_kernels.flash_mla_sparse_fwd(q, space, table[:, None], 0.25, attn_sink=sink, topk_length=lengths)
    row, seen, taken = 0, [], []
    for request, new in enumerate(news):
        for position in range(before, before + new):
            near = [int(to_swa[slots[request, p]]) for p in range(max(position - window + 1, 0), position + 1)]
            far = [int(groups[request, g]) for g in (1, 0)][: (position + 1) // 2]
            keys = [*(latent(extra, page_size, s) for s in far), *(latent(swa, page_size, s) for s in near)]
            for head in range(2):
                wanted = plain(q[row, head], keys, float(sink[head]))
                assert got[row, head].tolist() == pytest.approx(wanted, abs=1e-4)
            seen.append([*near, *[-1] * (64 - len(near))])
            taken.append([*far, *[-1] * (64 - len(far))])
            row += 1
    view = lambda cache: cache[:, : page_size * 584].view(4, page_size, 1, 584)  # noqa: E731
    cached, _ = dsv4_kernels.flash_mla_with_kvcache(
        q[:, None], view(swa), None, None, 512, None, softmax_scale=0.25, indices=torch.tensor(seen)[:, None],
        topk_length=torch.full((rows,), 64), attn_sink=sink, extra_k_cache=view(extra),
        extra_indices_in_kvcache=torch.tensor(taken)[:, None], extra_topk_length=torch.full((rows,), 64),
    )  # fmt: skip
    assert torch.allclose(cached[:, 0], got, atol=1e-5)


# --- hyper-connections --------------------------------------------------------------------------


@FEW
@given(seed=SEEDS, rows=st.integers(1, 3))
def test_streams_are_gated_mixed_and_put_back(seed: int, rows: int) -> None:
    """The gates are sigmoids, the mixture doubly stochastic; a block's output is added as they say."""
    n, hidden = 4, 16
    residual, fn = noise(seed, rows, n, hidden), noise(seed + 1, n * (n + 2), n * hidden) / 8
    scale, base = noise(seed + 2, 3), noise(seed + 3, n * (n + 2))
    post, comb, x = dsv4_kernels.mhc_pre(residual, fn, scale, base, EPS, EPS, 1e-9, 2.0, 50)
    sigmoid = lambda v: 1 / (1 + math.exp(-v))  # noqa: E731
    for row in range(rows):
        flat = residual[row].flatten().tolist()
        unit = normed(flat)
        mixes = [math.fsum(a * b for a, b in zip(unit, line, strict=True)) for line in fn.tolist()]
        pre = [sigmoid(mixes[i] * float(scale[0]) + float(base[i])) + EPS for i in range(n)]
        assert x[row].tolist() == pytest.approx(
            [math.fsum(pre[i] * flat[i * hidden + h] for i in range(n)) for h in range(hidden)], abs=1e-4
        )
        gates = [2 * sigmoid(mixes[n + i] * float(scale[1]) + float(base[n + i])) for i in range(n)]
        assert post[row, :, 0].tolist() == pytest.approx(gates, abs=1e-4)
        assert comb[row].sum(0).tolist() == pytest.approx([1] * n, abs=1e-4)
        assert comb[row].sum(1).tolist() == pytest.approx([1] * n, abs=2e-2)
        # Scaling rows and columns keeps the ratios of ratios of what was scaled.
        raw = [mixes[2 * n + i] * float(scale[2]) + float(base[2 * n + i]) for i in range(n * n)]
        cross = raw[0] - raw[1] - raw[n] + raw[n + 1]
        got = comb[row].double().log()
        assert float(got[0, 0] - got[0, 1] - got[1, 0] + got[1, 1]) == pytest.approx(cross, abs=1e-2)
    y = noise(seed + 4, rows, hidden)
    back = dsv4_kernels.mhc_post(y, residual, post, comb)
    for row in range(rows):
        for i in range(n):
            for h in (0, hidden - 1):
                mixed = math.fsum(float(comb[row, j, i]) * float(residual[row, j, h]) for j in range(n))
                assert float(back[row, i, h]) == pytest.approx(float(post[row, i, 0] * y[row, h]) + mixed, abs=1e-5)
    weight = noise(seed + 5, hidden)
    _, _, again = dsv4_kernels.mhc_pre(residual, fn, scale, base, EPS, EPS, 1e-9, 2.0, 50, norm_weight=weight, norm_eps=EPS)
    assert again[0].tolist() == pytest.approx(normed(x[0].tolist(), weight.tolist()), abs=1e-3)
    head = dsv4_kernels.fused_hc_head(residual, fn[:n].contiguous(), scale[:1], base[:n], EPS, EPS)
    assert torch.allclose(head, x, atol=1e-5), "the head gates the streams as a block's input does"


# --- what they promise --------------------------------------------------------------------------


@FEW
@given(seed=SEEDS, rows=st.integers(2, 40))
def test_a_row_does_not_depend_on_the_others(seed: int, rows: int) -> None:
    """Bit for bit: one row alone, and among others."""
    at = torch.arange(rows)
    q, weight = noise(seed, rows, 2, 128).bfloat16(), noise(seed + 1, rows, 2).bfloat16()
    values, weights = dsv4_kernels.fused_q_indexer_rope_hadamard_quant(q, weight, 0.1, FREQS, at)
    alone = dsv4_kernels.fused_q_indexer_rope_hadamard_quant(q[1:2], weight[1:2], 0.1, FREQS, at[1:2])
    assert torch.equal(values[1:2].float(), alone[0].float()) and torch.equal(weights[1:2], alone[1])
    residual, fn = noise(seed, rows, 4, 16).bfloat16(), noise(seed + 1, 24, 64)
    how = (fn, noise(1, 3), noise(2, 24), EPS, EPS, EPS, 2.0, 4)
    for many, one in zip(dsv4_kernels.mhc_pre(residual, *how), dsv4_kernels.mhc_pre(residual[1:2], *how), strict=True):
        assert torch.equal(many[1:2], one)


def test_a_tape_runs_a_kernel_again_and_it_looks_again() -> None:
    """A plan changed in place since the capture is the plan of the replay: what was frozen would be stale."""
    cache, kv = torch.zeros(2, 8 * 132, dtype=torch.uint8), noise(0, 2, 128)
    plan = Plan(4, torch.tensor([[4, 0, 0, 0], [-1, 0, -1, -1]]).int().view(torch.uint8), torch.empty(0, 8))
    graph = TapeGraph()
    graph.capture_begin()
    dsv4_kernels.compress_norm_rope_store(
        kv, plan, norm_weight=torch.ones(128), norm_eps=EPS, freq_cis=FREQS, out_loc=torch.tensor([3, 9]), kvcache=cache,
        page_size=8,
    )  # fmt: skip
    graph.capture_end()
    cache.zero_()
    plan.c.copy_(torch.tensor([[-1, 0, -1, -1], [8, 1, 0, 0]]).int().view(torch.uint8))
    graph.replay()
    assert not cache[0].any() and cache[1, 128:256].any()


def test_a_small_top_k_cuts_the_hosts_tables() -> None:
    """The host makes tables of 512 and is asked to; the model's are cut from them, and it keeps its own number."""

    def host(tables: SimpleNamespace, is_prefill: bool = False) -> None:
        assert tables.c4_sparse_topk in (512, 1024)
        tables.c4_sparse_topk_lengths = torch.tensor([1, 300])
        tables.c4_sparse_page_indices = torch.full((2, 512), -1)
        tables.c4_sparse_raw_indices = torch.empty(2, 512) if is_prefill else None

    tables = SimpleNamespace(c4_sparse_topk=64)
    dsv4_overrides.any_topk(host, tables, is_prefill=True)
    assert tables.c4_sparse_topk == 64 and tables.c4_sparse_topk_lengths.tolist() == [1, 64]
    assert tables.c4_sparse_page_indices.shape == tables.c4_sparse_raw_indices.shape == (2, 64)
    dsv4_overrides.any_topk(host, tables)
    assert tables.c4_sparse_raw_indices is None


def test_the_rehearsals_traffic_takes_every_path() -> None:
    """Contexts below and above what the indexer may keep, prefixes of a page, several chunks."""
    ladder = rehearse.Options(model="dsv4").ladder
    waves = traffic.waves(7, 24, 2, ladder, ladder[-1], VOCABULARY)
    sizes = {kind: [len(p) for w in waves if w.kind == kind for p in w.prompts] for kind in {w.kind for w in waves}}
    assert min(map(min, sizes.values())) < 4 * INDEX_TOPK < max(sizes["skewed"])
    assert min(sizes["chunked"]) > ladder[-1]
    assert min(sizes["shared prefix"]) > 256 and len(sizes["shared prefix"]) > 2
