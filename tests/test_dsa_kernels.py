"""The CPU kernels for DSA against formulas written out number by number, and what they refuse."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_bcg_dsa import rehearse, traffic  # noqa: E402
from sglang_bcg_dsa.testing import dsa_folder, dsa_kernels, dsa_overrides  # noqa: E402
from sglang_bcg_dsa.testing.dsa_kernels import PADDING_SLOT, batch_slots  # noqa: E402
from sglang_bcg_dsa.testing.models import INDEX_TOPK, VOCABULARY  # noqa: E402
from tests.conftest import ROOT, Run  # noqa: E402

DIM, PAGE = 128, 64
SEEDS = st.integers(0, 2**31)
SMALL = settings(max_examples=25, deadline=None)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fp8(seed: int, *shape: int) -> torch.Tensor:
    return noise(seed, *shape).to(torch.float8_e4m3fn)


# --- the indexer's inputs and caches ------------------------------------------------------------


@SMALL
@given(rows=st.integers(1, 5), seed=SEEDS, power=st.sampled_from([None, "ue8m0"]), size=st.floats(1e-9, 1e6))
def test_quantized_values_are_within_half_a_step(rows: int, seed: int, power: str | None, size: float) -> None:
    """Value times scale is the input up to FP8's rounding; the largest of a row uses FP8's range."""
    x = noise(seed, rows, DIM) * size
    values, scale = dsa_kernels.act_quant(x, DIM, power)
    assert values.dtype == torch.float8_e4m3fn
    assert values.device.index == 0, "the host's indexer demands a device with an index"
    for row in range(rows):
        (s,) = scale[row].tolist()
        largest = max(abs(v) for v in x[row].tolist())
        exact = max(largest, 1e-4) / 448
        assert s == pytest.approx(exact if power is None else 2 ** math.ceil(math.log2(exact)), rel=1e-6)
        for got, wanted in zip(values[row].float().tolist(), x[row].tolist(), strict=True):
            # Three bits after the leading one; below 2**-6 steps are of 2**-9.
            assert abs(got - wanted / s) <= max(abs(wanted / s) * 2**-4, 2**-10) * 1.001


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_hadamard_is_the_definition(size: int) -> None:
    """Entry (i, j) is minus one to the number of ones that i and j share."""
    x = noise(size, 3, 2, size)
    got = dsa_kernels.hadamard_transform(x, scale=size**-0.5)
    signs = [[(-1) ** (i & j).bit_count() for i in range(size)] for j in range(size)]
    for row, made in zip(x.view(-1, size).tolist(), got.view(-1, size).tolist(), strict=True):
        for j in range(size):
            exact = math.fsum(a * sign for a, sign in zip(row, signs[j], strict=True)) * size**-0.5
            assert made[j] == pytest.approx(exact, rel=1e-6, abs=1e-6)


@SMALL
@given(slots=st.lists(st.integers(1, 4 * PAGE - 1), min_size=1, max_size=20, unique=True), seed=SEEDS)
def test_index_keys_lie_where_the_pool_says(slots: list[int], seed: int) -> None:
    """A page holds 64 keys of 128 bytes, then 64 scales of 4; a gather gives back what was stored."""
    pages = torch.zeros(4, PAGE * (DIM + 4), dtype=torch.uint8)
    key, scale = fp8(seed, len(slots), DIM), noise(seed, len(slots), 1)
    with batch_slots(written=slots):
        dsa_kernels.set_index_k(pages, torch.tensor(slots), key, scale, PAGE)
    raw = pages.numpy().tobytes()
    for row, slot in enumerate(slots):
        page, at = slot // PAGE * PAGE * (DIM + 4), slot % PAGE
        assert raw[page + at * DIM : page + (at + 1) * DIM] == bytes(key[row].view(torch.uint8).tolist())
        place = page + PAGE * DIM + 4 * at
        assert struct.unpack("<f", raw[place : place + 4]) == (scale[row].item(),)
    order = torch.tensor([[3, 1], [0, 2]])
    keys, scales = dsa_kernels.get_index_k(pages, order, torch.tensor([70, 5]), 75, 70, PAGE, DIM)
    wanted = [*range(3 * PAGE, 4 * PAGE), *range(PAGE, PAGE + 6), *range(5)]
    for row, slot in enumerate(wanted):
        page, at = slot // PAGE * PAGE * (DIM + 4), slot % PAGE
        assert bytes(keys[row].tolist()) == raw[page + at * DIM : page + (at + 1) * DIM]
        assert bytes(scales[row].tolist()) == raw[page + PAGE * DIM + 4 * at :][:4]


# --- scores and selection -----------------------------------------------------------------------


def scores(q: torch.Tensor, k: torch.Tensor, scale: torch.Tensor, weights: torch.Tensor) -> list[list[float]]:
    """Row by key: the heads' products, negative ones dropped, weighted and scaled."""
    rows = []
    for row, of_heads in zip(q.float().tolist(), weights.tolist(), strict=True):
        rows.append([])
        for key, s in zip(k.float().tolist(), scale.tolist(), strict=True):
            products = [math.fsum(a * b for a, b in zip(head, key, strict=True)) for head in row]
            rows[-1].append(math.fsum(max(p, 0) * w for p, w in zip(products, of_heads, strict=True)) * s)
    return rows


@settings(max_examples=10, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=3), heads=st.integers(1, 4), seed=SEEDS, idle=st.integers(0, 4)
)
@example(lengths=[3], heads=2, seed=0, idle=2)
def test_index_scores_are_the_formula_for_each_row_alone(lengths: list[int], heads: int, seed: int, idle: int) -> None:
    """Ragged and paged give the formula, bit for bit whatever the other rows; beyond a context: not a number."""
    keys, rows = sum(lengths), len(lengths)
    q, k = fp8(seed, rows, heads, DIM), fp8(seed + 1, keys, DIM)
    scale, weights = noise(seed + 2, keys).abs(), noise(seed + 3, rows, heads)
    weights[:, :idle] = 0  # padded heads; all of them in an idle rank's made-up request
    ends = torch.tensor(lengths).cumsum(0)
    starts = ends - torch.tensor(lengths)
    got = dsa_kernels.fp8_mqa_logits(q, (k, scale), weights, starts, ends, clean_logits=False)
    wanted = scores(q, k, scale, weights)
    for row in range(rows):
        inside = range(int(starts[row]), int(ends[row]))
        for key in range(keys):
            if key in inside:
                assert got[row, key].item() == pytest.approx(wanted[row][key], rel=1e-6, abs=1e-6)
            else:
                assert math.isnan(got[row, key])
        one = slice(row, row + 1)
        alone = dsa_kernels.fp8_mqa_logits(q[one], (k, scale), weights[one], starts[one], ends[one])
        assert torch.equal(alone[0, inside], got[row, inside])

    pages = torch.zeros(rows + 1, PAGE * (DIM + 4), dtype=torch.uint8)
    for row in range(rows):
        slots = torch.arange(lengths[row]) + (row + 1) * PAGE
        inside = slice(int(starts[row]), int(ends[row]))
        with batch_slots(written=slots.tolist()):
            dsa_kernels.set_index_k(pages, slots, k[inside], scale[inside], PAGE)
    paged = dsa_kernels.fp8_paged_mqa_logits(
        q[:, None], pages.view(rows + 1, PAGE, 1, DIM + 4), weights, torch.tensor(lengths)[:, None],
        torch.arange(1, rows + 1)[:, None], torch.empty(0), PAGE,
    )  # fmt: skip
    for row in range(rows):
        assert torch.equal(paged[row, : lengths[row]], got[row, int(starts[row]) : int(ends[row])])
        assert paged[row, lengths[row] :].isnan().all()


VALUES = st.sampled_from([float("-inf"), -1.0, 0.0, 0.5, 2.0])


@SMALL
@given(
    rows=st.lists(st.tuples(st.lists(VALUES, max_size=8), st.lists(VALUES, min_size=1, max_size=8)), min_size=1, max_size=4),
    topk=st.integers(1, 10),
)
@example(rows=[([], [0.0] * 8), ([2.0], [1.0] * 3)], topk=4)
def test_top_k_takes_the_highest_and_of_equal_ones_the_first(
    rows: list[tuple[list[float], list[float]]], topk: int
) -> None:
    """As by sorting the row's own part alone; the place before it and what lies behind play no role."""
    width = 20
    table = torch.full((len(rows), width), float("nan"))
    for row, (before, own) in enumerate(rows):
        table[row, : len(before) + len(own)] = torch.tensor(before + own)
    starts = torch.tensor([len(before) for before, _ in rows], dtype=torch.int32)
    lengths = torch.tensor([len(own) for _, own in rows], dtype=torch.int32)
    got = dsa_kernels.fast_topk_v2(table, lengths, topk, starts)
    assert got.dtype == torch.int32
    slots = torch.arange(len(rows) * width, dtype=torch.int32).view(len(rows), width) + 1000
    each = torch.arange(len(rows) + 1, dtype=torch.int32)
    paged = dsa_kernels.fast_topk_transform_fused(table, lengths, slots, each, topk, starts)
    ragged = dsa_kernels.fast_topk_transform_ragged_fused(table, lengths, each[:-1] * 50, topk, starts)
    for row, (_, own) in enumerate(rows):
        best = sorted(sorted(range(len(own)), key=lambda at: (-own[at], at))[:topk])
        fill = [-1] * (topk - len(best))
        assert got[row].tolist() == best + fill
        assert paged[row].tolist() == [1000 + row * width + at for at in best] + fill
        assert ragged[row].tolist() == [row * 50 + at for at in best] + fill


def test_rows_of_one_request_share_its_page_table() -> None:
    """Two requests of two and three rows: each row's slots come from its own request."""
    table = torch.tensor([[10, 11, 12], [20, 21, 22]], dtype=torch.int32)
    lengths = torch.tensor([1, 2, 1, 2, 3], dtype=torch.int32)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    got = dsa_kernels.fast_topk_transform_fused(torch.zeros(5, 3), lengths, table, bounds, 2)
    assert got.tolist() == [[10, -1], [10, 11], [20, -1], [20, 21], [20, 21]]


# --- attention ----------------------------------------------------------------------------------


@SMALL
@given(chosen=st.lists(st.lists(st.integers(0, 11), max_size=6, unique=True), min_size=1, max_size=4), seed=SEEDS)
@example(chosen=[[], [3]], seed=0)
def test_sparse_attention_is_dense_attention_over_the_chosen(chosen: list[list[int]], seed: int) -> None:
    """Softmax over the selected slots alone; a row is the same bit for bit without the others."""
    heads, width, d_v, topk = 2, 12, 8, 6
    q, kv = noise(seed, len(chosen), heads, width), noise(seed + 1, 12, 1, width).bfloat16()
    indices = torch.tensor([[slots + [-1] * (topk - len(slots))] for slots in chosen], dtype=torch.int32)
    with batch_slots(read=range(12)):
        out = dsa_kernels.flash_mla_sparse_fwd(q, kv, indices, 0.3, d_v)[0]
        for row, slots in enumerate(chosen):
            one = slice(row, row + 1)
            assert torch.equal(out[one], dsa_kernels.flash_mla_sparse_fwd(q[one], kv, indices[one], 0.3, d_v)[0])
            cut = dsa_kernels.flash_mla_sparse_fwd(
                q[one], kv, indices[one].abs(), 0.3, d_v, topk_length=torch.tensor([len(slots)])
            )[0]
            assert torch.equal(out[one], cut), "what lies beyond the length does not count"
    for row, slots in enumerate(chosen):
        for head in range(heads):
            query = q[row, head].tolist()
            keys = [kv[slot, 0].float().tolist() for slot in slots]
            raw = [math.exp(0.3 * math.fsum(a * b for a, b in zip(query, key, strict=True))) for key in keys]
            for at in range(d_v):
                exact = math.fsum(r * key[at] for r, key in zip(raw, keys, strict=True)) / (math.fsum(raw) or 1)
                assert out[row, head, at].item() == pytest.approx(exact, rel=1e-5, abs=1e-6)


# --- what is refused ----------------------------------------------------------------------------


def write(slots: list[int]) -> None:
    dsa_kernels.set_mla_kv_buffer(
        torch.zeros(9, 1, 3), torch.tensor(slots), torch.ones(len(slots), 1, 2), torch.ones(len(slots), 1, 1)
    )


def test_a_padded_row_can_touch_the_padding_slot_only() -> None:
    """A row beyond the batch's tokens that carries another's slot, or a stale one, is an error, not a wrong token."""
    with batch_slots(written=[3, 4], read=[1, 3, 4]):
        write([3, 4, PADDING_SLOT, PADDING_SLOT])
        with pytest.raises(RuntimeError, match=r"rows write KV cache slots \[5\].*may write slot 0 only"):
            write([3, 4, 5])
        with pytest.raises(RuntimeError, match="written by two rows"):
            write([3, 4, 4])
        with pytest.raises(RuntimeError, match=r"rows read KV cache slots \[2\]"):
            dsa_kernels.flash_mla_sparse_fwd(torch.ones(1, 1, 3), torch.ones(9, 1, 3), torch.tensor([[[1, 2, -1]]]), 1.0, 2)
    write([PADDING_SLOT] * 4)
    with pytest.raises(RuntimeError, match="slots \\[3\\]"):
        write([3])


def test_written_rows_are_the_batch_s() -> None:
    """The hook on the model runner opens the batch's slots, and closes them again."""
    runner = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.tensor([[0, 0, 0, 0], [5, 6, 7, 8]])))
    batch = SimpleNamespace(
        out_cache_loc=torch.tensor([7]), req_pool_indices=torch.tensor([1]), seq_lens=torch.tensor([3])
    )

    def forward(runner: object, batch: object) -> tuple[frozenset[int], frozenset[int]]:
        return dsa_kernels._batch

    assert dsa_overrides.with_its_slots(forward, runner, batch) == ({7}, {5, 6, 7})
    assert dsa_kernels._batch == (set(), set())


# --- how the host gets to them ------------------------------------------------------------------


def test_the_host_finds_the_kernels_under_their_libraries_names(fresh: Run, tmp_path: Path) -> None:
    """With the folder on the path, and only then."""
    folder = dsa_folder.write_distribution(tmp_path / "dsa")
    code = (
        "from sglang_bcg_dsa.testing import dsa_folder\n"
        "print(dsa_folder.is_on_the_path())\n"
        "import deep_gemm, flash_mla, sgl_kernel, sgl_kernel.flash_mla\n"
        "print(deep_gemm.fp8_mqa_logits.__module__, sgl_kernel.fast_topk_v2.__module__, "
        "flash_mla.flash_mla_sparse_fwd is sgl_kernel.flash_mla.flash_mla_sparse_fwd)\n"
    )
    done = fresh(code, path=(folder, ROOT))
    kernels = "sglang_bcg_dsa.testing.dsa_kernels"
    assert done.stdout.splitlines() == ["True", f"{kernels} {kernels} True"], done.stderr
    assert not dsa_folder.is_on_the_path()


@pytest.mark.parametrize(
    ("asker", "cuda", "hopper"),
    [
        ("sglang.srt.layers.attention.dsa.dsa_indexer", True, False),
        ("sglang.srt.layers.attention.dsa_backend", True, True),
        ("sglang.srt.arg_groups.overrides", False, True),
        ("sglang.srt.layers.layernorm", False, False),
    ],
)
def test_only_dsa_is_told_that_this_is_cuda(asker: str, cuda: bool, hopper: bool) -> None:
    """Every other module gets the host's own answer: no kernel of theirs may be reached."""
    asked = {"__name__": asker, "is_cuda": dsa_overrides.is_cuda, "capability": dsa_overrides.capability}
    exec("def ask(): return is_cuda(lambda: False), capability(lambda: None) == (9, 0)", asked)
    assert asked["ask"]() == (cuda, hopper)


def test_a_server_with_a_row_missing_does_not_start() -> None:
    """Nothing was hooked in this process: the model is not built, and each row that is missing is named."""
    with pytest.raises(SystemExit, match="not in force") as stopped:
        dsa_overrides.build_model(pytest.fail)
    for target in ("torch.cuda.get_device_capability", "parallel_state.is_cuda", "set_mla_kv_buffer_triton"):
        assert target in str(stopped.value)


# --- the rehearsal's traffic --------------------------------------------------------------------


def test_top_k_is_a_selection_in_the_rehearsal_s_traffic() -> None:
    """In each kind of wave but the single smallest, some context is longer than what a token may attend to."""
    waves = traffic.waves(7, 24, 2, rehearse.LADDER, rehearse.CHUNK, VOCABULARY)
    longest = {}
    for wave in waves:
        longest[wave.kind] = max(longest.get(wave.kind, 0), *map(len, wave.prompts))
    for kind in ("lone", "shared prefix", "chunked", "skewed"):
        assert longest[kind] > INDEX_TOPK, longest
    assert longest["skewed"] == rehearse.LADDER[-1] == 2 * INDEX_TOPK, "also in one replayed bucket"
