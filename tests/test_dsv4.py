"""DSV4 under prefill graphs: real metadata classes and builders, what waits for a break, what a break writes."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from sglang_bcg_dsa.backends import dsv4  # noqa: E402
from sglang_bcg_dsa.config import Config  # noqa: E402
from sglang_bcg_dsa.errors import CaptureError, MetadataError, StartupError  # noqa: E402
from sglang_bcg_dsa.hooks.attention import AttentionFeature  # noqa: E402
from sglang_bcg_dsa.memory import Shape, draft_mb, graph_mb, need_mb, scores_mb, shortage, tables_mb  # noqa: E402
from sglang_bcg_dsa.metadata import Contract, Policy, fields_of  # noqa: E402
from sglang_bcg_dsa.reasons import ReasonTable  # noqa: E402
from sglang_bcg_dsa.seams import examine, resolve  # noqa: E402
from sglang_bcg_dsa.testing import TapeGraph  # noqa: E402

SEAMS = examine()
HOST, METADATA, CORE, PLAN = (resolve(SEAMS[f"dsv4.{part}"]) for part in ("backend", "metadata", "core", "plan"))
REAL = SEAMS.field("dsv4.real_tokens")
MODULE = importlib.import_module(HOST.__module__)
NEWER = "present_ratios" in fields_of(CORE)
BUCKET, PAGE, SLOTS, CONTEXT = 64, 256, 5, 4096
COPIED = tuple(name for name, policy in dsv4.CORE.items() if policy is Policy.COPY)


def bound(online: bool = False) -> Contract:
    return dsv4.contract(METADATA, CORE, PLAN, online=online)


# ---------------------------------------------------------------------- a backend without a model


@pytest.fixture(autouse=True)
def builders(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the host's metadata builders run on a GPU: functions of the same inputs, with the same shapes."""
    from sglang.srt.environ import envs

    def compression(lens: Any, positions: Any, loc: Any, table: Any, page: int, compute_page_indices: bool) -> Any:
        blocks = torch.arange(table.shape[1] * 2)
        slots = torch.where(blocks < (lens // 128)[:, None], table.repeat_interleave(2, 1) * 2 + blocks % 2, -1)
        found = []
        for ratio in (4, 128):
            found += [torch.where(lens % ratio == 0, loc // ratio, 0), positions // ratio * ratio, lens // ratio,
                      (lens // ratio).clamp(min=1)]  # fmt: skip
        return (*found, slots.int() if compute_page_indices else None)

    def plan(compress_ratio: int, *, seq_lens: Any, extend_lens: Any, seq_lens_cpu: Any = None, num_q_tokens: Any = None,
             extend_lens_cpu: Any = None, **_: Any) -> Any:  # fmt: skip
        rows = sum(extend_lens_cpu) if num_q_tokens is None else num_q_tokens
        stamp = (seq_lens * compress_ratio + extend_lens).sum().to(torch.uint8)
        return PLAN(compress_ratio, stamp.expand(rows, 16).contiguous(), stamp.expand(rows, 8).contiguous())

    monkeypatch.setattr(MODULE, "_init_compression_metadata_triton", compression)
    monkeypatch.setattr(MODULE, "_create_flashmla_metadata", object)
    monkeypatch.setattr(MODULE, "create_paged_compressor_data", plan)
    monkeypatch.setenv(envs.SGLANG_FP8_PAGED_MQA_LOGITS_TORCH.name, "1")
    if not NEWER:
        monkeypatch.setenv(envs.SGLANG_OPT_USE_TOPK_V2.name, "0")


def pool() -> Any:
    mapping = torch.arange(SLOTS * CONTEXT + 1) * 3 % 1009
    mapping[-1] = -1  # the host's own mark for a slot that no window reaches
    return SimpleNamespace(
        full_to_swa_index_mapping=mapping, translate_loc_from_full_to_swa=lambda loc: mapping[loc], swa_page_size=256,
        layer_transfer_counter=None, request_window=None, swa_req_ring_size=None, start_layer=3, layer_num=4,
        get_ring_size=lambda compress_ratio: {4: 8, 128: 128}[compress_ratio],
    )  # fmt: skip


def backend(cls: type) -> Any:
    """A backend of the class, given what its metadata builders read; its constructor wants a model."""
    made: Any = object.__new__(cls)
    slots = torch.arange(SLOTS * CONTEXT, dtype=torch.int32).view(SLOTS, CONTEXT)
    given = {
        "req_to_token": slots, "req_to_token_pool": SimpleNamespace(req_to_token=slots), "token_to_kv_pool": pool(),
        "page_size": PAGE, "swa_page_size": 128, "cuda_int32_kwargs": {"dtype": torch.int32, "device": torch.device("cpu")},
        "c4_topk": 512, "index_topk": 512, "present_ratios": (0, 4, 128), "low_ratios": (), "has_c4": True, "has_c128": True,
        "MAX_SEQ_LEN_FOR_CAPTURE": CONTEXT, "topk": 0, "mtp_enabled": False, "is_dspark_draft": False, "trtllm_attn": False,
        "online_c128_mtp": SimpleNamespace(prepare_forward=lambda *_, **__: 0), "is_draft_runner": False,
        "enable_deepseek_v4_fp4_indexer": False, "dsa_topk_backend": SimpleNamespace(should_use_topk_v2=lambda: False),
        "enable_decoder_swa_bounded_replay": False, "forward_metadata": None, "hisparse_coordinator": None,
        "live_rows": 0, "tables": None, "_unproven": None, "_over": None, "_building": None, "_holder": None, "_waiting": {},
        "_projected": None,
    }  # fmt: skip
    for name, value in given.items():
        setattr(made, name, value)
    return made


def ours(online: bool = False, contract: Contract | None = None) -> Any:
    return backend(dsv4.with_replay(HOST, contract or bound(online), REAL, online))


def batch(lens: list[tuple[int, int]], rows: int | None = None, slots: list[int] | None = None) -> Any:
    """A prefill of requests (prefix, new tokens), padded to ``rows``; the fields that builders read."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    new, total = [n for _, n in lens], [p + n for p, n in lens]
    real = sum(new)
    rows = real if rows is None else rows
    slots = slots or list(range(1, len(lens) + 1))
    loc = [slot * CONTEXT + p + i for slot, (p, n) in zip(slots, lens, strict=True) for i in range(n)]
    given = {
        "forward_mode": ForwardMode.EXTEND, "_original_forward_mode": None, "batch_size": len(lens),
        "req_pool_indices": torch.tensor(slots), "seq_lens": torch.tensor(total), "seq_lens_cpu": torch.tensor(total),
        "extend_seq_lens": torch.tensor(new), "extend_seq_lens_cpu": new,
        "out_cache_loc": torch.tensor(loc + [0] * (rows - real)),
        "extend_start_loc": torch.tensor([sum(new[:i]) for i in range(len(new))]), "max_seq_len_override": None,
        "spec_info": None, "encoder_swa_replay": False, "encoder_row_floor": None, "encoder_swa_row_floor": None,
        "encoder_swa_compress_rows": None, "attn_cp_metadata": None, REAL: real,
    }  # fmt: skip
    return SimpleNamespace(**given)


requests = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 20)), min_size=1, max_size=3)


def captured_by(made: Any) -> Any:
    return made.init_forward_metadata_for_breakable_cuda_graph_capture(batch([(0, BUCKET)]))


def replay(made: Any, captured: Any, lens: list[tuple[int, int]]) -> Any:
    made.prepare_forward_metadata_for_breakable_cuda_graph_replay(
        captured, batch(lens), static_forward_batch=batch(lens, BUCKET)
    )
    return captured


def addresses(metadata: Any) -> dict[str, int]:
    core = metadata.core_attn_metadata
    found = {name: getattr(core, name).data_ptr() for name in COPIED}
    for plan in ("c4_compress_metadata", "c128_compress_metadata"):
        found |= {f"{plan}.{part}": getattr(getattr(metadata, plan), part).data_ptr() for part in ("plan_c", "plan_w")}
    return found


# ---------------------------------------------------------------------- policies


@pytest.mark.parametrize(("which", "make"), [("core", "dataclass"), ("metadata", "dataclass"), ("plan", "tuple")])
def test_a_field_without_a_policy_is_named(which: str, make: str) -> None:
    """Invariant: every field of the host's classes is declared; a release that adds one stops at start, naming it."""
    bound()
    classes = {"metadata": METADATA, "core": CORE, "plan": PLAN}
    cls = classes[which]
    if make == "tuple":
        from collections import namedtuple

        classes[which] = namedtuple("Grown", [*cls._fields, "new_table"])  # type: ignore[misc]
    else:
        classes[which] = dataclasses.make_dataclass("Grown", [*sorted(fields_of(cls)), "new_table"])
    with pytest.raises(MetadataError, match="Grown.new_table has no policy"):
        dsv4.contract(**classes, online=False)


def test_tables_of_the_context_are_never_copied() -> None:
    """What grows with the context is rebound: 72 bytes a row are copied, whatever the context."""
    made = ours()
    captured = captured_by(made)
    core = captured.core_attn_metadata
    copied = [getattr(core, name) for name in COPIED]
    copied += [part for plan in (captured.c4_compress_metadata, captured.c128_compress_metadata) for part in plan[1:3]]
    assert sum(t.numel() * t.element_size() for t in copied) == 72 * BUCKET
    assert {dsv4.CORE[name] for name in ("page_table", "c128_page_indices", "c4_sparse_page_indices")} == {Policy.REBIND}


# ---------------------------------------------------------------------- refresh


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(requests, min_size=2, max_size=4))
def test_addresses_stay_and_values_are_the_eager_ones(batches: list[list[tuple[int, int]]]) -> None:
    """Whatever batches come: captured kernels read this batch at the captured address, breaks read its eager tables."""
    made, eager = ours(), backend(HOST)
    captured = captured_by(made)
    kept = addresses(captured)
    for lens in batches:
        replay(made, captured, lens)
        assert made.forward_metadata is captured
        assert addresses(captured) == kept
        rows = sum(n for _, n in lens)
        whole = eager._build_forward_metadata(batch(lens))
        core, expected = captured.core_attn_metadata, whole.core_attn_metadata
        expected.swa_out_cache_loc = eager.token_to_kv_pool.translate_loc_from_full_to_swa(batch(lens).out_cache_loc).int()
        for name in sorted(fields_of(CORE)):
            policy, one, other = dsv4.CORE[name], getattr(core, name), getattr(expected, name)
            if isinstance(one, torch.Tensor) and name != "c4_sparse_raw_indices":
                one = one[:rows] if policy is Policy.COPY else one
                assert one.dtype == other.dtype, name
                assert torch.equal(one, other), name
            elif policy is Policy.EQUAL:
                assert one == other, name
        assert core.c4_sparse_raw_indices.shape == expected.c4_sparse_raw_indices.shape
        for plan in ("c4_compress_metadata", "c128_compress_metadata"):
            for one, other in zip(getattr(captured, plan)[1:3], getattr(whole, plan)[1:3], strict=True):
                assert torch.equal(one[:rows], other)
        for field in dataclasses.fields(whole.indexer_metadata):
            one, other = (getattr(m.indexer_metadata, field.name, None) for m in (captured, whole))
            assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other, field.name
        assert captured.indexer_metadata.page_table is core.page_table


@pytest.mark.parametrize("wrong", COPIED)
def test_a_wrong_policy_is_a_stale_value(wrong: str) -> None:
    """A field that a captured kernel reads, declared rebound: the tape shows the value of capture."""

    def replayed(policies: dict[str, Policy]) -> dict[str, Any]:
        known = {n: p for n, p in {**dsv4.CORE, **policies}.items() if n in fields_of(CORE)}
        parts = bound()._policies
        made = ours(contract=Contract(METADATA, {**parts, "core_attn_metadata": Contract(CORE, known)}))
        captured = captured_by(made)
        graph = TapeGraph()
        graph.capture_begin()
        read = {name: getattr(captured.core_attn_metadata, name) + 0 for name in COPIED}
        graph.capture_end()
        replay(made, captured, [(700, 9), (120, 20)])
        graph.replay()
        return {name: torch.equal(read[name], getattr(captured.core_attn_metadata, name)) for name in COPIED}

    assert all(replayed({}).values())
    assert replayed({wrong: Policy.REBIND}) == {name: name != wrong for name in COPIED}


def test_one_batch_s_tables_live_at_a_time() -> None:
    """A bucket does not hold its last batch's tables until it is used again, nor those of its capture."""
    made = ours()
    first, second = captured_by(made), captured_by(made)
    assert first.core_attn_metadata.page_table is None
    assert first.indexer_metadata is None
    replay(made, first, [(1000, 9)])
    assert second.core_attn_metadata.page_table is None
    replay(made, second, [(10, 3)])
    replay(made, first, [(10, 3)])
    assert first.core_attn_metadata.page_table.shape == (3, 1), "the width of the batch"


class NoSync(TorchDispatchMode):
    """Fails where a GPU would wait: a value read from a tensor that is not the host's own."""

    def __init__(self, *own: Any) -> None:
        super().__init__()
        self.own = list(own)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [a for a in args if isinstance(a, torch.Tensor)]
        host = bool(inputs) and all(any(a is b for b in self.own) for a in inputs)
        name = func.name()
        if not host and any(word in name for word in ("_local_scalar_dense", "nonzero", "_unique", "masked_select")):
            raise AssertionError(f"{name} waits for the device")
        result = func(*args, **(kwargs or {}))
        if host and isinstance(result, torch.Tensor):
            self.own.append(result)
        return result


def test_a_refresh_does_not_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of a batch but its lengths on the host is read there; the check itself is seen to fail."""
    made = ours()
    captured = captured_by(made)
    static, live = batch([(700, 9), (128, 20)], BUCKET), batch([(700, 9), (128, 20)])
    with NoSync(static.seq_lens_cpu) as mode:

        def reader(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
            def reads(tensor: Any, *args: Any, **kwargs: Any) -> Any:
                assert any(tensor is one for one in mode.own), f"{name} waits for the device"
                return read(tensor, *args, **kwargs)

            return reads

        for name in ("item", "tolist", "cpu", "numpy"):
            monkeypatch.setattr(torch.Tensor, name, reader(name, getattr(torch.Tensor, name)))
        made.prepare_forward_metadata_for_breakable_cuda_graph_replay(captured, live, static_forward_batch=static)
        for wait in (lambda t: t.tolist(), lambda t: t.sum().item(), lambda t: int(t[0])):
            with pytest.raises(AssertionError, match="waits for the device"):
                wait(static.seq_lens)


class Launches(TorchDispatchMode):
    """Counts what a GPU would launch: each operator but views and allocations, and each kernel the host has for one."""

    kernels = (("ExpandPrefillCausally", "execute"), ("BuildPageTablePositions", "execute"),
               ("BuildCausalSwaPageIndices", "execute"), ("_init_compression_metadata_triton", None),
               ("_plan", None))  # fmt: skip

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        self.in_kernel = False
        plan = MODULE.create_paged_compressor_data
        monkeypatch.setattr(MODULE, "_plan", plan, raising=False)

        def convert(compress_ratio: int, *, req_pool_indices: Any, seq_lens: Any, extend_lens: Any, **how: Any) -> Any:
            lens = [tensor.to(torch.int64) for tensor in (req_pool_indices, seq_lens, extend_lens)]
            return MODULE._plan(compress_ratio, req_pool_indices=lens[0], seq_lens=lens[1], extend_lens=lens[2], **how)

        monkeypatch.setattr(MODULE, "create_paged_compressor_data", convert)
        for name, method in self.kernels:
            owner, attribute = (getattr(MODULE, name), method) if method else (MODULE, name)
            monkeypatch.setattr(owner, attribute, self.kernel(name, getattr(owner, attribute)))

    def kernel(self, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def launch(*args: Any, **kwargs: Any) -> Any:
            self.names.append(name)
            self.in_kernel = True
            try:
                return run(*args, **kwargs)
            finally:
                self.in_kernel = False

        return launch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.in_kernel and not func.is_view and not func.name().startswith("aten::empty"):
            self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_refresh_launches_less_than_the_host_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant, where SGLang builds: copies are grouped; the host's kernels run once each."""
    launches = Launches(monkeypatch)
    found = {}
    for name, made in (("host", backend(HOST)), ("ours", ours())):
        lens = [(700, 9), (128, 20)]
        padded = batch(lens, BUCKET)
        # As the host's own batch has them.
        padded.extend_seq_lens = padded.extend_seq_lens.to(torch.int32)
        captured = made.init_forward_metadata_for_breakable_cuda_graph_capture(batch([(0, BUCKET)]))
        launches.names.clear()
        with launches:
            made.prepare_forward_metadata_for_breakable_cuda_graph_replay(
                captured, batch(lens), static_forward_batch=padded
            )
        found[name] = list(launches.names)
    assert found["ours"].count("aten::_foreach_copy_") <= 3, "one for each type"
    for kernel, _ in launches.kernels:
        assert found["ours"].count(kernel) == found["host"].count(kernel) > 0
    assert len(found["ours"]) <= 0.7 * len(found["host"]), {name: len(names) for name, names in found.items()}


@pytest.mark.parametrize("owner", ["core_attn_metadata.c4_out_loc", "core_attn_metadata.page_size", "c4_compress_metadata"])
def test_what_does_not_fit_is_named_before_anything_is_written(owner: str) -> None:
    """The quick comparison finds a shape, a value or a None that a captured kernel would not expect."""
    made = ours()
    captured, live = captured_by(made), made._live_metadata(batch([(700, 9)], BUCKET), 9)
    kept = captured.core_attn_metadata.positions_casual.clone()
    holder, _, name = owner.rpartition(".")
    where = getattr(live, holder) if holder else live
    setattr(where, name, {"c4_out_loc": torch.zeros(1, dtype=torch.int64), "page_size": 7}.get(name))
    with pytest.raises(MetadataError, match=owner):
        bound().refresh(captured, live)
    assert torch.equal(captured.core_attn_metadata.positions_casual, kept)


def test_a_table_that_neither_side_has_stays_absent() -> None:
    """A model without a ratio: the rest is refreshed all the same."""
    made = ours()
    captured, live = captured_by(made), made._live_metadata(batch([(700, 9)], BUCKET), 9)
    for metadata in (captured, live):
        metadata.core_attn_metadata.c128_out_loc = metadata.c128_compress_metadata = None
    bound().refresh(captured, live)
    core, expected = captured.core_attn_metadata, live.core_attn_metadata
    assert core.c128_out_loc is None
    assert torch.equal(core.positions_casual, expected.positions_casual)
    assert core.page_table is expected.page_table


def test_a_cache_that_is_filled_layer_by_layer_is_waited_for_once() -> None:
    """Captured compressors read cached states without waiting; the last layer is waited for before the replay."""
    made, waited = ours(), []
    captured = captured_by(made)
    made.token_to_kv_pool.layer_transfer_counter = object()
    made.token_to_kv_pool.wait_layer_transfer = waited.append
    replay(made, captured, [(10, 3)])
    assert waited == [6]


def test_an_idle_rank_has_no_real_row() -> None:
    """The host makes up a request of bucket length for it; none of it is real."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    made = ours()
    captured = captured_by(made)
    live = batch([(0, BUCKET)], slots=[0])
    live._original_forward_mode = ForwardMode.IDLE
    made.prepare_forward_metadata_for_breakable_cuda_graph_replay(
        captured, live, static_forward_batch=batch([(0, BUCKET)], slots=[0])
    )
    assert made.live_rows == 0


def test_rows_are_cut_and_never_grown() -> None:
    """Invariant: a tensor with fewer rows than there are queries is refused with its name and both counts."""
    assert dsv4.cut("page_table", torch.arange(6), 4).tolist() == [0, 1, 2, 3]
    with pytest.raises(MetadataError, match=r"page_table has 6 rows for 7 queries"):
        dsv4.cut("page_table", torch.arange(6), 7)


# ---------------------------------------------------------------------- what waits for a break

HEADS, DIM = 2, 4


class Layer:
    """One C4 layer of a model, as the host calls its backend: project in the segment, then attend in a break."""

    layer_id, ratio = 7, 128

    def __init__(self, made: Any, monkeypatch: pytest.MonkeyPatch, fp4: bool = False) -> None:
        self.made, self.fp4, self.log = made, fp4, []
        self.queries = torch.zeros(BUCKET, HEADS, DIM)
        monkeypatch.setattr(dsv4, "in_breakable_region", lambda: True)
        monkeypatch.setattr(dsv4, "capturing", lambda: self.capturing)
        monkeypatch.setattr(HOST, "_forward_prepare_normal", self.project)
        monkeypatch.setattr(HOST, "_forward_prepare_multi_stream", self.project)
        monkeypatch.setattr(HOST, "forward_c4_indexer", self.index)
        monkeypatch.setattr(HOST, "forward_core_compressor", self.store)
        self.capturing = False
        self.batch: Any = None
        self.break_ = dsv4.Attention(self.attend, lambda: SimpleNamespace(forward_batch=self.batch), lambda: made)

    def project(self, *_: Any, positions: Any, forward_batch: Any, **how: Any) -> Any:
        self.log.append(f"project {len(positions)}")
        weights = torch.ones(len(positions), HEADS, 1)
        return ((self.queries, self.queries[..., 0]) if self.fp4 else self.queries), weights

    def index(self, *_: Any, x: Any, q_lora: Any, c4_indexer: Any, forward_batch: Any) -> None:
        # The host's own order: it projects, then it scores and writes the selected slots.
        q, weights = self.made._forward_prepare_normal(
            x=x, q_lora=q_lora, c4_indexer=c4_indexer, positions=None, forward_batch=forward_batch
        )
        core = self.made.forward_metadata.core_metadata
        q = q[0] if self.fp4 else q
        assert len(q) == len(weights) == len(x) == len(core.c4_sparse_page_indices) == len(core.page_table)
        self.log.append(f"select {len(q)}")
        core.c4_sparse_page_indices[:] = int(q.sum())

    def store(self, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> None:
        scores = compressor.compute_kv_score(x, forward_batch)
        self.log.append(f"compress {len(scores)} {compressor.ratio}")

    def compute_kv_score(self, x: Any, forward_batch: Any) -> Any:
        self.log.append("score")
        return x

    def attend(self, query: Any, key_value: Any, output: Any, *_: Any) -> None:
        rows = getattr(self.batch, REAL)
        core = self.made.forward_metadata.core_metadata
        self.log.append(f"attend {rows}")
        output[:rows] = core.c4_sparse_page_indices[:rows, :1, None].float()

    def segment(self, **how: Any) -> None:
        x = torch.zeros(BUCKET, DIM)
        self.made.forward_c4_indexer(
            x=x, q_lora=torch.zeros(BUCKET, 2), c4_indexer=self, forward_batch=batch([(0, BUCKET)]), **how
        )

    def run(self, left: dict[str, Any]) -> Any:
        output = torch.full((BUCKET, HEADS, DIM), float("nan"))
        self.break_.attend(self.queries, self.queries, output, self.layer_id, 4, None, False, **left)
        return output


@pytest.mark.parametrize("how", [{}, {"enable_multi_stream": True, "alt_streams": [], "q_lora_ready": None}, {"fp4": True}])
def test_a_layer_projects_in_the_segment_and_selects_in_its_break(how: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture scores nothing; a replay selects for its real rows, from what the segment wrote, before it attends."""
    made = ours()
    layer = Layer(made, monkeypatch, how.pop("fp4", False))
    captured = captured_by(made)
    layer.capturing, layer.batch = True, batch([(0, BUCKET)])
    layer.segment(**how)
    left = made.take(layer.layer_id, 4)
    assert not layer.run(left).any()
    assert layer.log == [f"project {BUCKET}"]
    layer.capturing = False
    for value, lens in ((3.0, [(1000, 5), (0, 4)]), (5.0, [(0, 1)])):
        rows = sum(n for _, n in lens)
        layer.log.clear()
        replay(made, captured, lens)
        layer.batch = batch(lens, BUCKET)
        layer.queries.fill_(value)
        output = layer.run(left)
        assert layer.log == [f"select {rows}", f"attend {rows}"]
        assert (output[:rows] == value * rows * HEADS * DIM).all(), "attention reads this replay's selection"
        assert not output[rows:].any(), "padded rows are defined"


def test_a_rank_without_tokens_selects_and_attends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero real tokens: zeroes, no kernel launched on empty tensors."""
    made = ours()
    layer = Layer(made, monkeypatch)
    captured_by(made)
    layer.segment()
    made.live_rows = 0
    layer.log.clear()
    assert not layer.run(made.take(layer.layer_id, 4)).any()
    assert layer.log == []


def test_work_left_to_a_break_is_done_once_and_never_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A C4 layer that did not select, or whose selection nobody took, stops: it would attend to stale slots."""
    made = ours()
    layer = Layer(made, monkeypatch)
    captured_by(made)
    with pytest.raises(CaptureError, match="layer 7 attends over selected blocks, but its indexer did not run"):
        made.take(7, 4)
    assert made.take(7, 0) == made.take(7, 128) == {}
    layer.segment()
    with pytest.raises(CaptureError, match="layer 7 left work to its attention break, but the last"):
        layer.segment()
    captured_by(made)
    layer.segment()


def test_online_compression_leaves_the_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is the live batch's: rebound, and used in the break for the live rows; C4 stays captured."""
    made = ours(online=True)
    layer = Layer(made, monkeypatch)
    captured = captured_by(made)
    before = captured.c128_compress_metadata
    replay(made, captured, [(300, 6)])
    assert captured.c128_compress_metadata is not before
    assert bound(online=False)._policies["c128_compress_metadata"] is not Policy.REBIND
    x = torch.zeros(BUCKET, DIM)
    made.forward_core_compressor(x, batch([(0, BUCKET)]), 7, layer)
    assert layer.log == ["score"]
    left = made.take(7, 128)
    layer.batch = batch([(300, 6)], BUCKET)
    layer.run(left)
    assert layer.log == ["score", "compress 6 128", "attend 6"]
    layer.ratio = 4
    made.forward_core_compressor(x, batch([(0, BUCKET)]), 7, layer)
    assert layer.log[-2:] == ["score", f"compress {BUCKET} 4"]


def test_outside_a_breakable_region_nothing_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode and eager prefills are the host's, to the letter."""
    made = ours()
    layer = Layer(made, monkeypatch)
    monkeypatch.setattr(dsv4, "in_breakable_region", lambda: False)
    made.forward_metadata = backend(HOST)._build_forward_metadata(batch([(0, BUCKET)]))
    monkeypatch.setattr(HOST, "_forward_prepare_normal", lambda *_, **__: (layer.queries, torch.ones(BUCKET, HEADS, 1)))
    layer.segment()
    assert layer.log == [f"select {BUCKET}"]
    assert made._waiting == {}


@pytest.mark.parametrize("prefills", [False, True])
def test_a_breakable_decode_graph_is_never_ours(prefills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It verifies drafts in a mode that counts as a prefill, but the live rows are another forward's, or none: zeroes."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    made = ours(online=True)
    layer = Layer(made, monkeypatch)
    if prefills:
        captured_by(made)
    made.forward_metadata = backend(HOST)._build_forward_metadata(batch([(0, BUCKET)]))
    monkeypatch.setattr(HOST, "_forward_prepare_normal", lambda *_, **__: (layer.queries, torch.ones(BUCKET, HEADS, 1)))
    verify = batch([(0, BUCKET)])
    verify.forward_mode = ForwardMode.TARGET_VERIFY
    assert verify.forward_mode.is_extend()
    x = torch.zeros(BUCKET, DIM)
    made.forward_c4_indexer(x=x, q_lora=torch.zeros(BUCKET, 2), c4_indexer=layer, forward_batch=verify)
    made.forward_core_compressor(x, verify, 7, layer)
    assert layer.log == [f"select {BUCKET}", "score", f"compress {BUCKET} 128"], "the host's own, at once"
    seen: list[Any] = []
    with installed(monkeypatch) as run:
        monkeypatch.setattr(importlib.import_module(SEAMS["dsv4.current"].module), "get_attn_backend", lambda: made)
        run.feature._attend = lambda *_, **__: pytest.fail("our break")
        run.feature.on_attend(lambda *call: seen.append(call), 1, 1, 2, 7, 4, None, False)
    assert seen == [(1, 1, 2, 7, 4, None, False)]


# ---------------------------------------------------------------------- memory

SHAPE = Shape(hidden=4096, streams=4, heads=64, index_heads=64, topk=512, chunked=False)


@pytest.mark.parametrize(
    ("context", "gib"), [(2**16, (0.127, 0.508)), (2**17, (0.252, 1.008)), (2**18, (0.502, 2.008)), (2**20, (2.002, 8.008))]
)
def test_sglang_s_own_scratch_is_what_the_host_map_says(context: int, gib: tuple[float, float]) -> None:
    """Scores of 2048 and 8192 rows at the full context and the four tokens its table has more."""
    assert [round(scores_mb(tokens, context + 4) / 1024, 3) for tokens in (2048, 8192)] == list(gib)


def test_our_graphs_do_not_grow_with_the_context() -> None:
    """What stays captured is the same at any context: half a GiB at 2048 tokens, of which metadata is 1.3 MB."""
    ladder = [*range(4, 2048, 64), 2048]
    assert graph_mb(ladder, SHAPE) - graph_mb([2048], SHAPE) == sum(ladder[:-1]) * 72 / 2**20
    assert round(graph_mb([2048], SHAPE)) == 497
    assert need_mb([2048], 2**20, SHAPE) - need_mb([2048], 2**16, SHAPE) > 1920
    assert need_mb([2048], 2**20, dataclasses.replace(SHAPE, chunked=True)) < 700


def test_a_draft_model_s_graphs_keep_tables_for_every_bucket() -> None:
    """The host's own, as wide as the context: at 1M tokens 53 kB a row, for all rows of the ladder."""
    ladder, wide = [1024, 2048, 4096], dataclasses.replace(SHAPE, wide_draft=True)
    more = need_mb(ladder, 2**20, wide) - need_mb(ladder, 2**20, SHAPE)
    assert more == pytest.approx(draft_mb(ladder, 2**20, wide)) == pytest.approx(7 * tables_mb(1024, 2**20, SHAPE))
    assert round(more) == 368
    assert draft_mb(ladder, 2**20, SHAPE) == 0


@given(st.floats(1, 20_000), st.lists(st.integers(8, 16_384), min_size=1, max_size=6), st.integers(256, 2**20))
def test_what_is_said_to_fit_fits(left: float, sizes: list[int], context: int) -> None:
    """A shortage names a bucket and a context that do fit, and counts what is missing."""
    ladder = sorted(set(sizes))
    short = shortage(left, ladder, context, SHAPE)
    assert (short is None) == (need_mb(ladder, context, SHAPE) <= left)
    if short is not None:
        assert short.need - short.missing == pytest.approx(left)
        assert short.tokens is None or need_mb([n for n in ladder if n <= short.tokens], context, SHAPE) <= left
        assert short.context is None or need_mb(ladder, short.context, SHAPE) <= left


# ---------------------------------------------------------------------- the feature


@contextmanager
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The feature with its hooks kept apart, and the host's registry as it was afterwards."""
    from sglang.srt.layers.attention import attention_registry

    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    hooks: dict[str, Callable[..., Any]] = {}
    feature = AttentionFeature()
    installer = SimpleNamespace(around=hooks.__setitem__, after=hooks.__setitem__)
    feature.bcg_install(Config(), SEAMS, ReasonTable([]), installer)  # type: ignore[arg-type]
    feature._parallel = lambda: SimpleNamespace(attn_cp_size=1)
    yield SimpleNamespace(feature=feature, hooks=hooks, registry=attention_registry.ATTENTION_BACKENDS)


def test_the_registry_gives_our_backend_for_what_we_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V4 gets ours; draft models, V4.1, other attention and split prefills get what SGLang chose."""
    with installed(monkeypatch) as run:
        def init(self: Any, runner: Any) -> None:
            self.__dict__.update({**backend(HOST).__dict__, **runner})

        monkeypatch.setattr(HOST, "__init__", init)
        created: list[Any] = []

        def create(runner: Any) -> Any:
            created.append(runner.pop("cls", HOST)(runner))
            return created[-1]

        monkeypatch.setattr(importlib.import_module(SEAMS["dsv4.create"].module), "create_dsv4_backend", create)
        made = run.registry["dsv4"]({})
        assert isinstance(made, HOST)
        assert type(made).__qualname__ == HOST.__qualname__
        assert made.selects_in_breaks
        assert made._unproven is None, "without a GPU there is no kernel to prove"
        assert run.feature.bcg_state() == {"dsv4_tables": "SGLang"}
        made = run.registry["dsv4"]({"req_to_token": SimpleNamespace(is_cuda=True)})
        tables = made._unproven(made, ours()._live_metadata(batch([(0, BUCKET)]), BUCKET))
        assert tables._make_schedule is resolve(SEAMS["dsv4.schedule"])
        other = type("Other", (HOST,), {})
        for runner in ({"is_draft_runner": True}, {"low_ratios": (1, 2)}, {"cls": other},
                       {"enable_decoder_swa_bounded_replay": True}):  # fmt: skip
            assert run.registry["dsv4"](runner) is created[-1], runner
        run.feature._parallel = lambda: SimpleNamespace(attn_cp_size=2)
        assert run.registry["dsv4"]({}) is created[-1]


def test_a_backend_that_another_plugin_registered_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Captured graphs of SGLang's own would hold scores of the full context: the start ends."""
    with installed(monkeypatch) as run:
        verify = run.hooks["dsv4.built"]
        verify(None, None, SimpleNamespace(attn_backend=ours()))
        with pytest.raises(StartupError, match="another plugin registered 'dsv4'"):
            verify(None, None, SimpleNamespace(attn_backend=backend(HOST)))


def test_a_break_of_another_backend_is_the_host_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft model's attention passes through untouched; ours goes with what its layer left."""
    with installed(monkeypatch) as run:
        seen: list[Any] = []
        current = importlib.import_module(SEAMS["dsv4.current"].module)
        monkeypatch.setattr(current, "get_attn_backend", lambda: backend(HOST))
        arguments = (1, 1, 2, 7, 4, None, False)
        run.feature.on_attend(lambda *a: seen.append(a), *arguments)
        assert seen == [arguments]
        made = ours()
        captured_by(made)
        made._waiting = {"select": "work"}
        monkeypatch.setattr(dsv4, "in_breakable_region", lambda: True)
        monkeypatch.setattr(current, "get_attn_backend", lambda: made)
        run.feature._attend = lambda *a, **left: seen.append((a, left))
        run.feature.on_attend(lambda *a: pytest.fail("the host's break"), *arguments)
        assert seen[1:] == [(arguments, {"select": "work"})]


def test_the_host_s_engine_runs_two_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the tape: a break a layer and no more; each replay selects from what its own segment projected."""
    from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as engine

    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: torch.cpu.current_stream())
    monkeypatch.setattr(engine, "_weak_ref_if_tensor", lambda value: value)
    real = dsv4.capturing
    made = ours()
    layer = Layer(made, monkeypatch)
    monkeypatch.setattr(dsv4, "capturing", real)
    with installed(monkeypatch) as run:
        for seam, value in (("dsv4.current", lambda: made), ("dsv4.body", layer.attend),
                            ("dsv4.context", lambda: SimpleNamespace(forward_batch=layer.batch))):  # fmt: skip
            monkeypatch.setattr(importlib.import_module(SEAMS[seam].module), SEAMS[seam].name, value)
        captured = captured_by(made)
        layer.batch = batch([(0, BUCKET)])
        x = torch.zeros(BUCKET, HEADS, DIM)
        graph = engine.BreakableCUDAGraph()
        with engine.BreakableCUDAGraphCapture(graph):
            hidden = x + 1
            for factor in (2, 3):
                layer.queries = hidden * factor
                layer.segment()
                output = torch.empty_like(hidden)
                run.feature.on_attend(None, layer.queries, layer.queries, output, 7, 4, None, False)
                hidden = output + 1
        assert len(graph._break_fns) == 2
        assert not any("select" in line for line in layer.log)
        for value, lens in ((1.0, [(0, 3)]), (2.0, [(500, 1), (0, 1)])):
            rows = sum(n for _, n in lens)
            replay(made, captured, lens)
            layer.batch = batch(lens, BUCKET)
            x.fill_(value)
            graph.replay()
            first = (value + 1) * 2 * rows * HEADS * DIM
            assert (hidden[:rows] == (first + 1) * 3 * rows * HEADS * DIM + 1).all()
            assert (hidden[rows:] == 1).all()


if "dsv4.budget" in SEAMS:  # a host that scores in chunks

    def test_scores_are_chunked_in_a_break_as_they_are_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
        """The host has no budget where it would score in a graph; a break's own metadata gets the static one."""
        from sglang_bcg_dsa import engine

        with installed(monkeypatch) as run:
            budget = run.feature.on_budget
            metadata = SimpleNamespace(
                use_prefill_cuda_graph=False, max_compressed_seq_len=2**18,
                compressed_seq_lens=SimpleNamespace(device=SimpleNamespace(type="cuda", index=0)),
            )  # fmt: skip
            module = importlib.import_module(SEAMS["dsv4.budget.bytes"].module)
            monkeypatch.setattr(module, "mqa_logits_static_budget_bytes", lambda device_index: 1 << 30)
            none: Any = lambda *_, **__: None  # noqa: E731
            assert budget(none, metadata, num_rows=2048) is None, "eager: the host's own answer"
            monkeypatch.setattr(engine, "in_breakable_region", lambda: True)
            assert budget(none, metadata, num_rows=2048) == 1 << 30
            assert budget(none, metadata, num_rows=1) is None, "few scores need no budget"
            assert budget(lambda *_, **__: 5, metadata, num_rows=2048) == 5
            metadata.use_prefill_cuda_graph = True
            assert budget(none, metadata, num_rows=2048) is None


def test_two_batch_overlap_computes_nothing_when_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixed batch has no split index, and asking for one stops: neither capture nor schedule may ask."""
    overlap = importlib.import_module("sglang.srt.batch_overlap.two_batch_overlap")
    monkeypatch.setattr(overlap, "is_tbo_enabled", lambda: False)
    monkeypatch.setattr(overlap, "compute_split_seq_index", lambda **_: pytest.fail("a split index was computed"))
    plugin: Any = object.__new__(overlap.TboCudaGraphRunnerPlugin)
    plugin.capture_one_batch_size(batch([(0, 8)]), num_tokens=8)
    monkeypatch.setattr(overlap, "get_deepep_mode", lambda: None)
    monkeypatch.setattr(overlap, "get_moe_a2a_backend", lambda: SimpleNamespace(is_none=lambda: True))
    preparer: Any = object.__new__(overlap.TboDPAttentionPreparer)
    preparer._compute_local_forward_mode = lambda _: 0
    assert preparer.prepare_all_gather(batch([(0, 8)])) == (False, 0)
