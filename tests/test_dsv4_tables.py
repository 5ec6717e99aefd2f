"""The kernel that writes DSV4's metadata: what SGLang's builders give, and the proof of it at start."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from functools import partial
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
from sglang_bcg_dsa.testing.dsv4_kernels import prefill_plans  # noqa: E402
from tests import test_dsv4 as made_here  # noqa: E402
from tests.test_dsv4 import CORE, PLAN, REAL, Launches, batch, bound  # noqa: E402
from tests.test_dsv4 import builders as builders  # noqa: E402

# Triton's interpreter reads loop bounds from arrays of one number.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0 to a scalar:DeprecationWarning")
SMALL = 24
"""Rows of a bucket here: each takes the interpreter about 10 ms."""
KERNEL = InterpretedFunction(dsv4_tables.write_tables.fn)
"""The same kernel, run by Triton's interpreter."""


class Launched:
    """A kernel whose launch is ``run(launch, *args, **kwargs)``, ``launch`` being the real one's."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: tuple[int]) -> Any:
        return partial(self.run, KERNEL[grid])


@pytest.fixture(autouse=True)
def plans(builders: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[int, int]]:
    """The host's planner with its own formula; ``rings`` and ``tails`` for both ratios may be set."""
    chosen = {"rings": (8, 128), "tails": (0, 0)}

    def plan(compress_ratio: int, *, token_to_kv_pool: Any, req_to_token: Any, req_pool_indices: Any, seq_lens: Any,
             extend_lens: Any, num_q_tokens: int, **_: Any) -> Any:  # fmt: skip
        which = compress_ratio == 128
        return PLAN(compress_ratio, *prefill_plans(
            compress_ratio, req_pool_indices, seq_lens, extend_lens, req_to_token, token_to_kv_pool.full_to_swa_index_mapping,
            token_to_kv_pool.swa_page_size, chosen["rings"][which], num_q_tokens, True, chosen["tails"][which],
        ))  # fmt: skip

    monkeypatch.setattr(made_here.MODULE, "create_paged_compressor_data", plan)
    return chosen


def ours(kernel: Any = KERNEL, rings: tuple[int, int] = (8, 128)) -> Any:
    """A backend whose metadata the kernel writes, once it has proved it."""

    def make(backend: Any, metadata: Any) -> Any:
        return dsv4_tables.Tables(metadata, backend.token_to_kv_pool, object, kernel)

    made = made_here.backend(dsv4.with_replay(made_here.HOST, bound(), REAL, False, make))
    made.token_to_kv_pool.get_ring_size = lambda compress_ratio: rings[compress_ratio == 128]
    made._unproven = make
    return made


def captured(made: Any) -> Any:
    return made.init_forward_metadata_for_breakable_cuda_graph_capture(batch([(0, SMALL)]))


def replay(made: Any, over: Any, lens: list[tuple[int, int]], slots: list[int] | None = None) -> Any:
    made.prepare_forward_metadata_for_breakable_cuda_graph_replay(
        over, batch(lens, slots=slots), static_forward_batch=batch(lens, SMALL, slots)
    )
    return over


requests = st.lists(st.tuples(st.integers(0, 3000), st.integers(0, SMALL // 3)), min_size=1, max_size=3).filter(
    lambda lens: sum(n for _, n in lens) > 0
)


PROVEN: dict[tuple[int, ...], Any] = {}
"""Tables by rings, tails and pages of the window: the proof takes the interpreter a second or two."""


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=1, max_size=3),
       st.sampled_from([(8, 128, 0, 0, 256), (16, 256, 4, 4, 128), (16, 256, 10, 20, 256)]),
       st.randoms(use_true_random=False))  # fmt: skip
def test_the_kernel_writes_what_sglang_builds(
    plans: Any, batches: list[list[tuple[int, int]]], spec: tuple[int, ...], random: Any
) -> None:
    """Whatever requests come, in whatever slots, with padding, with rings of speculation as both hosts keep them: every
    field, bit by bit; what captured kernels read at its address."""
    plans.update(rings=spec[:2], tails=spec[2:4])
    host, made = made_here.ours(), ours(rings=spec[:2])  # type: ignore[arg-type]
    for backend in (host, made):
        backend.token_to_kv_pool.swa_page_size = spec[4]
    if spec in PROVEN:
        made.tables, made._unproven = PROVEN[spec], None
    ones, others = captured(made), captured(host)
    PROVEN[spec] = made.tables
    assert made.tables is not None
    kept = made_here.addresses(ones)
    for lens in batches:
        slots = random.sample(range(1, made_here.SLOTS), len(lens))
        replay(made, ones, lens, slots)
        replay(host, others, lens, slots)
        assert dsv4_tables.difference(ones, others, dsv4.CORE) is None
        assert made_here.addresses(ones) == kept
        assert ones.indexer_metadata.page_table is ones.core_attn_metadata.page_table


def test_a_refresh_launches_a_sixth_of_the_host_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant: one kernel, no copy, none of SGLang's builders; what else runs narrows lengths and makes schedules."""
    launches, found = Launches(monkeypatch), {}

    def count(launch: Any, *args: Any, **kwargs: Any) -> None:
        launches.kernel("write_tables", launch)(*args, **kwargs)

    for name, made in (("host", made_here.backend(made_here.HOST)), ("ours", ours(Launched(count)))):
        lens = [(700, 9), (128, 12)]
        padded = batch(lens, SMALL)
        padded.extend_seq_lens = padded.extend_seq_lens.to(torch.int32)
        over = captured(made)
        launches.names.clear()
        with launches:
            made.prepare_forward_metadata_for_breakable_cuda_graph_replay(over, batch(lens), static_forward_batch=padded)
        found[name] = list(launches.names)
    assert found["ours"].count("write_tables") == 1
    assert not {*(kernel for kernel, _ in launches.kernels), "aten::_foreach_copy_", "aten::copy_"} & set(found["ours"])
    assert 6 * len(found["ours"]) <= len(found["host"]), found


def test_one_kernel_serves_captures_and_prefills() -> None:
    """Captures count new tokens in int64, prefills in int32: another type would be compiled while serving."""
    types = set()

    def note(launch: Any, *args: Any, **kwargs: Any) -> None:
        types.add(tuple(arg.dtype if isinstance(arg, torch.Tensor) else type(arg) for arg in args))
        launch(*args, **kwargs)

    made = ours(Launched(note))
    over, padded = captured(made), batch([(700, 9)], SMALL)
    padded.extend_seq_lens = padded.extend_seq_lens.to(torch.int32)
    made.prepare_forward_metadata_for_breakable_cuda_graph_replay(over, batch([(700, 9)]), static_forward_batch=padded)
    assert len(types) == 1


def test_the_proof_is_given_before_the_first_capture_and_leaves_no_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Pools are as before; later captures prove nothing again."""
    made = ours()
    pool, slots = made.token_to_kv_pool.full_to_swa_index_mapping, made.req_to_token
    before = pool.clone(), slots.clone()
    with caplog.at_level(logging.INFO):
        captured(made)
        captured(made)
    assert isinstance(made.tables, dsv4_tables.Tables)
    assert made.tables_by == "one kernel"
    assert torch.equal(pool, before[0])
    assert torch.equal(slots, before[1])
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.endswith("SGLang's builders gave the same for 4 batches")
    assert made.live_rows == SMALL


ARGUMENTS = list(dsv4_tables._POINTERS + dsv4_tables._SCALARS)
WRONG = {
    **dict.fromkeys(ARGUMENTS, torch.empty_like), **dict.fromkeys(dsv4_tables._SCALARS, lambda n: n - 1),
    "pool_indices": lambda t: t.flip(0), "seq_lens": lambda t: t + 1, "extend_lens": lambda t: t.roll(1),
    "out_loc": lambda t: t + 1, "req_to_token": lambda t: t.roll(1, 1), "full_to_swa": lambda t: t.roll(1),
    "requests": lambda n: 1, "columns": lambda n: n - 64, "tail4": lambda n: n + 1, "tail128": lambda n: n + 1,
}  # fmt: skip


@pytest.mark.parametrize("wrong", ARGUMENTS)
def test_a_kernel_that_reads_or_writes_something_else_is_not_used(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    """Each argument of the kernel matters to the proof: with any of them wrong SGLang builds, and the log says why."""

    def change(launch: Any, *args: Any, **kwargs: Any) -> None:
        launch(*(WRONG[wrong](arg) if name == wrong else arg for name, arg in zip(ARGUMENTS, args, strict=True)), **kwargs)

    made = ours(Launched(change))
    over = captured(made)
    assert made.tables is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert "SGLang builds DSV4's tables" in said
    assert "came out different" in said
    assert made.tables_by in said.replace("SGLang builds DSV4's tables, which makes prefills about 0.5 ms slower:", "SGLang:")
    host = made_here.ours()
    expected = replay(host, captured(host), [(700, 9), (120, 12)])
    assert dsv4_tables.difference(replay(made, over, [(700, 9), (120, 12)]), expected, dsv4.CORE) is None


def changed(core: Any, name: str, value: Any) -> Any:
    made = copy.copy(core)
    setattr(made, name, value)
    return made


def test_a_model_without_a_ratio_is_sglang_s() -> None:
    """A tensor that the kernel would not write, or would write for nobody, is named."""
    host = made_here.ours()
    metadata = host._live_metadata(batch([(0, SMALL)]), SMALL)
    metadata.core_attn_metadata.c128_out_loc = None
    with pytest.raises(MetadataError, match="does not write c128_out_loc as this model has it"):
        dsv4_tables.Tables(metadata, host.token_to_kv_pool, object)


def test_an_unknown_wish_of_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A builder that is asked for more than we know of must not answer with less."""
    made = ours()
    over = captured(made)
    build = made.init_forward_metadata_prefill
    monkeypatch.setattr(made, "init_forward_metadata_prefill", lambda **given: build(**given, floor=torch.zeros(1)))
    with pytest.raises(MetadataError, match="asked for with floor"):
        replay(made, over, [(700, 9)])


def refuse(*_: Any, **__: Any) -> None:
    raise ValueError("no compiler")


@pytest.mark.parametrize(("what", "says"), [("compiler", "ValueError: no compiler"), ("slots", "no slot"), ("tail", "too small")])
def test_a_server_starts_without_the_kernel(what: str, says: str, plans: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A kernel that does not compile, a pool without a slot, a bucket that does not show what a plan keeps."""
    made = ours(Launched(refuse) if what == "compiler" else KERNEL)
    if what == "slots":
        made.req_to_token = made.req_to_token_pool.req_to_token = made.req_to_token[:1]
    if what == "tail":
        plans.update(rings=(16, 256), tails=(10, SMALL + 1))
    over = made.init_forward_metadata_for_breakable_cuda_graph_capture(batch([(0, SMALL)], slots=[0]))
    assert made.tables is None
    assert says in made.tables_by
    assert says in caplog.text
    replay(made, over, [(3, 9)], [0])
    assert over.core_attn_metadata.positions_casual[:9].tolist() == list(range(3, 12))


@pytest.mark.parametrize(("rows", "live"), [(SMALL + 1, 9), (SMALL, SMALL + 1)])
def test_rows_that_were_not_captured_are_refused(rows: int, live: int) -> None:
    """The kernel writes at captured addresses: a row too many would be someone else's memory."""
    made = ours()
    over = captured(made)
    padded = batch([(0, 9)], rows)
    setattr(padded, REAL, live)
    with pytest.raises(MetadataError, match="do not fit the 24 rows of the capture"):
        made.prepare_forward_metadata_for_breakable_cuda_graph_replay(over, batch([(0, 9)]), static_forward_batch=padded)


def test_every_field_of_the_host_is_compared() -> None:
    """A field that the proof would skip could go wrong unseen."""
    metadata = made_here.ours()._live_metadata(batch([(300, 40)]), 40)
    core = metadata.core_attn_metadata
    for name in sorted(fields_of(CORE)):
        value = getattr(core, name, None)
        if isinstance(value, torch.Tensor):
            other: Any = value[:-1] if name == "c4_sparse_raw_indices" else value + 1
        else:
            other = ("another",) if value is None else None
        wrong = changed(metadata, "core_attn_metadata", changed(core, name, other))
        assert dsv4_tables.difference(wrong, metadata, dsv4.CORE) == name
    for name in dsv4_tables.PLANS:
        plan = getattr(metadata, name)
        for part in ("compress_ratio", "plan_c", "plan_w"):
            wrong = changed(metadata, name, plan._replace(**{part: getattr(plan, part) + 1}))
            assert dsv4_tables.difference(wrong, metadata, dsv4.CORE) == f"{name}.{part}"


@pytest.mark.parametrize("capability", [90, 100])
def test_the_kernel_compiles_for_gpus(capability: int) -> None:
    """Without a GPU: from source to machine code, with the types that a server gives it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = dsv4_tables.write_tables
    wide = {"pool_indices", "out_loc", "full_to_swa", "c4_out", "c128_out"}
    signature = {name: ("*i64" if name in wide else "*i32") for name in dsv4_tables._POINTERS}
    signature |= dict.fromkeys(dsv4_tables._SCALARS, "i32")
    constants = {"PAGE": 256, "WINDOW": 128, "BLOCK": 1024}
    signature |= dict.fromkeys(constants, "constexpr")
    built = triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", capability, 32))
    assert len(built.asm["cubin"]) > 1000
