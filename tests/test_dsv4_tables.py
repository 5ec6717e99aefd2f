"""The kernel that writes DSV4's tables: what SGLang's builders give, and the proof of it at start."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

import triton  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from triton.runtime.interpreter import InterpretedFunction  # noqa: E402

from sglang_bcg_dsa.backends import dsv4, dsv4_tables  # noqa: E402
from sglang_bcg_dsa.errors import MetadataError  # noqa: E402
from sglang_bcg_dsa.metadata import fields_of  # noqa: E402
from tests import test_dsv4 as made_here  # noqa: E402
from tests.test_dsv4 import BUCKET, COPIED, CORE, REAL, Launches, batch, bound, captured_by, replay  # noqa: E402
from tests.test_dsv4 import builders as builders  # noqa: E402

# Triton's interpreter reads loop bounds from arrays of one number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
KERNEL = InterpretedFunction(dsv4_tables.write_tables.fn)
"""The same kernel, run by Triton's interpreter."""


class Broken:
    """The kernel with one of its arguments changed."""

    def __init__(self, position: int, change: Any) -> None:
        self.position, self.change = position, change

    def __getitem__(self, grid: tuple[int]) -> Any:
        def run(*args: Any, **kwargs: Any) -> None:
            given = list(args)
            given[self.position] = self.change(given[self.position])
            KERNEL[grid](*given, **kwargs)

        return run


def ours(kernel: Any = KERNEL, *, proven: bool = True) -> Any:
    """A backend whose tables the kernel writes, proven already or yet to be."""

    def make(_: Any, core: Any) -> Any:
        return dsv4_tables.Tables(core, object, kernel)

    made = made_here.backend(dsv4.with_replay(made_here.HOST, bound(), REAL, False, make))
    if proven:
        made.tables = make(made, made_here.ours()._live_metadata(batch([(0, BUCKET)]), BUCKET).core_attn_metadata)
    else:
        made._unproven = make
    return made


requests = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 20)), min_size=1, max_size=3).filter(
    lambda lens: sum(n for _, n in lens) > 0
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=1, max_size=3), st.randoms(use_true_random=False))
def test_the_kernel_writes_what_sglang_builds(batches: list[list[tuple[int, int]]], random: Any) -> None:
    """Whatever requests come, in whatever slots, with padding: every field, bit by bit; copied ones at their address."""
    host, made = made_here.ours(), ours()
    ones, others = captured_by(made), captured_by(host)
    kept = [getattr(ones.core_attn_metadata, name).data_ptr() for name in COPIED]
    for lens in batches:
        slots = random.sample(range(1, made_here.SLOTS), len(lens))
        for backend, captured in ((made, ones), (host, others)):
            backend.prepare_forward_metadata_for_breakable_cuda_graph_replay(
                captured, batch(lens, slots=slots), static_forward_batch=batch(lens, BUCKET, slots)
            )
        assert dsv4_tables.difference(ones.core_attn_metadata, others.core_attn_metadata, dsv4.CORE) is None
        assert [getattr(ones.core_attn_metadata, name).data_ptr() for name in COPIED] == kept
        assert ones.indexer_metadata.page_table is ones.core_attn_metadata.page_table
        for plan in ("c4_compress_metadata", "c128_compress_metadata"):
            for one, other in zip(getattr(ones, plan)[1:3], getattr(others, plan)[1:3], strict=True):
                assert torch.equal(one, other)


def test_a_refresh_launches_a_third_of_the_host_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: one kernel and one copy; none of SGLang's builders but of plans, and no translation of its own."""
    launches, found = Launches(monkeypatch), {}

    class Counted:
        def __getitem__(self, grid: tuple[int]) -> Any:
            return launches.kernel("write_tables", KERNEL[grid])

    for name, made in (("host", made_here.backend(made_here.HOST)), ("ours", ours(Counted()))):
        lens = [(700, 9), (128, 20)]
        padded = batch(lens, BUCKET)
        padded.extend_seq_lens = padded.extend_seq_lens.to(torch.int32)
        captured = captured_by(made)
        launches.names.clear()
        with launches:
            made.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, batch(lens), static_forward_batch=padded)
        found[name] = list(launches.names)
    assert found["ours"].count("write_tables") == found["ours"].count("aten::_foreach_copy_") == 1
    assert {kernel for kernel, _ in launches.kernels} & set(found["ours"]) == {"_plan"}
    assert 3 * len(found["ours"]) <= len(found["host"]), found


def test_the_proof_is_given_before_the_first_capture_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Pools are as before; later captures prove nothing again."""
    made = ours(proven=False)
    pool, slots = made.token_to_kv_pool.full_to_swa_index_mapping, made.req_to_token
    before = pool.clone(), slots.clone()
    with caplog.at_level(logging.INFO):
        captured_by(made)
        captured_by(made)
    assert isinstance(made.tables, dsv4_tables.Tables)
    assert torch.equal(pool, before[0])
    assert torch.equal(slots, before[1])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("SGLang's builders gave the same for 3 batches")
    assert made.live_rows == BUCKET


ARGUMENTS = list(dsv4_tables._POINTERS + dsv4_tables._SCALARS)
WRONG = {
    **dict.fromkeys(ARGUMENTS, torch.empty_like),
    "pool_indices": lambda t: t.flip(0), "seq_lens": lambda t: t + 1, "extend_lens": lambda t: t.roll(1),
    "out_loc": lambda t: t + 1, "req_to_token": lambda t: t.roll(1, 1), "full_to_swa": lambda t: t.roll(1),
    "requests": lambda n: 1, "columns": lambda n: n - 64, **dict.fromkeys(
        ("tokens", "live", "token_stride", "pages", "topk", "pitch"), lambda n: n - 1),
}  # fmt: skip


@pytest.mark.parametrize("wrong", ARGUMENTS)
def test_a_kernel_that_reads_or_writes_something_else_is_not_used(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each argument of the kernel matters to the proof: with any of them wrong SGLang builds, and the log says why."""
    made = ours(Broken(ARGUMENTS.index(wrong), WRONG[wrong]), proven=False)
    captured = captured_by(made)
    assert made.tables is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "SGLang builds DSV4's tables" in said
    assert "came out different" in said
    replay(made, captured, [(700, 9), (120, 20)])
    host = made_here.ours()
    expected = replay(host, captured_by(host), [(700, 9), (120, 20)])
    assert dsv4_tables.difference(captured.core_attn_metadata, expected.core_attn_metadata, dsv4.CORE) is None


def changed(core: Any, name: str, value: Any) -> Any:
    made = copy.copy(core)
    setattr(made, name, value)
    return made


def test_a_model_without_a_ratio_is_sglang_s() -> None:
    """A tensor that the kernel would not write, or would write for nobody, is named."""
    core = made_here.ours()._live_metadata(batch([(0, BUCKET)]), BUCKET).core_attn_metadata
    with pytest.raises(MetadataError, match="does not write c128_out_loc as this model has it"):
        dsv4_tables.Tables(changed(core, "c128_out_loc", None), object)


def test_an_unknown_wish_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that is asked for more than we know of must not answer with less."""
    made = ours()
    captured = captured_by(made)
    build = made.make_core_attn_metadata
    monkeypatch.setattr(made, "make_core_attn_metadata", lambda **given: build(**given, floor=torch.zeros(1)))
    with pytest.raises(MetadataError, match="asked for with floor"):
        replay(made, captured, [(700, 9)])


@pytest.mark.parametrize(("rows", "live"), [(BUCKET + 1, 9), (BUCKET, BUCKET + 1)])
def test_rows_that_were_not_captured_are_refused(rows: int, live: int) -> None:
    """The kernel writes at captured addresses: a row too many would be someone else's memory."""
    made = ours()
    captured = captured_by(made)
    padded = batch([(0, 9)], rows)
    setattr(padded, REAL, live)
    with pytest.raises(MetadataError, match="do not fit the 64 rows of the capture"):
        made.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, batch([(0, 9)]), static_forward_batch=padded)


def test_every_field_of_the_host_is_compared() -> None:
    """A field that the proof would skip could go wrong unseen."""
    core = made_here.ours()._live_metadata(batch([(300, 40)]), 40).core_attn_metadata
    for name in sorted(fields_of(CORE)):
        value = getattr(core, name, None)
        if isinstance(value, torch.Tensor):
            other: Any = value[:-1] if name == "c4_sparse_raw_indices" else value + 1
        else:
            other = ("another",) if value is None else None
        assert dsv4_tables.difference(changed(core, name, other), core, dsv4.CORE) == name


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernel_compiles_for_gpus(capability: int) -> None:
    """Without a GPU: from source to machine code, with the types that a server gives it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = dsv4_tables.write_tables
    wide = {"pool_indices", "seq_lens_", "out_loc", "full_to_swa", "c4_out", "c128_out"}
    signature = {name: ("*i64" if name in wide else "*i32") for name in dsv4_tables._POINTERS}
    signature |= dict.fromkeys(dsv4_tables._SCALARS, "i32")
    constants = {"PAGE": 256, "WINDOW": 128, "BLOCK": 1024}
    signature |= dict.fromkeys(constants, "constexpr")
    built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
    assert len(built.asm["cubin"]) > 1000
