"""DSA under prefill graphs: what is captured, what is a break, and what captured kernels read of a batch."""

from __future__ import annotations

import dataclasses
import inspect
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_bcg_dsa.backends import dsa  # noqa: E402
from sglang_bcg_dsa.breaks import Break  # noqa: E402
from sglang_bcg_dsa.errors import CaptureError, MetadataError, StartupError  # noqa: E402
from sglang_bcg_dsa.hooks.attention import AttentionFeature, local_tokens  # noqa: E402
from sglang_bcg_dsa.records import State  # noqa: E402
from sglang_bcg_dsa.seams import examine, resolve  # noqa: E402

SEAMS = examine()
NATIVE = "attention.native" in SEAMS
K = 4
"""Selected slots of a row in these tests."""


def test_the_host_decides_whether_the_feature_is_ours() -> None:
    """A host that accepts prefixes and keeps what its graphs read keeps its DSA; DSV4 is ours on every host."""
    feature = AttentionFeature().bcg_feature(None, SEAMS)  # type: ignore[arg-type]
    assert feature.state is (State.EXTENDED if NATIVE else State.SUPPLIED)


def test_every_field_of_the_host_s_metadata_has_a_policy() -> None:
    """Invariant: a host release that adds a field is found at start, with the field's name."""
    from sglang.srt.layers.attention.dsa_backend import DSAMetadata

    declared = {field.name for field in dataclasses.fields(DSAMetadata)}
    if not NATIVE:
        assert declared == dsa.POLICIES.keys()
        dsa.contract(DSAMetadata)
    grown = dataclasses.make_dataclass("DSAMetadata", [*sorted(declared & dsa.POLICIES.keys()), "new_table"])
    with pytest.raises(MetadataError, match="new_table has no policy"):
        dsa.contract(grown)


# ---------------------------------------------------------------------- the selection


class Batch:
    """A live batch: ``rows`` real rows, contexts within the top k or not."""

    def __init__(self, rows: int, short: bool) -> None:
        self.rows, self.short = rows, short
        self.attention = object()


class Metadata:
    def __init__(self, batch: Batch, log: list[str]) -> None:
        self._batch, self._log = batch, log
        self.attn_metadata = batch.attention

    def get_seqlens_expanded(self) -> Any:
        return torch.arange(1, self._batch.rows + 1)

    def topk_transform(self, scores: Any, topk: int) -> Any:
        self._log.append("whole")
        return torch.arange(10, 10 + scores.shape[0])[:, None].expand(-1, topk).int()


class Indexer:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def _should_skip_logits_computation(self, batch: Batch) -> bool:
        return batch.short

    def _get_topk_ragged(self, dual: bool, batch: Batch, layer: int, q: Any, weights: Any, metadata: Any, out: Any) -> None:
        self._log.append(f"scored {layer}")
        assert len(q) == len(weights) == batch.rows
        out[: batch.rows] = 20 + layer


class Capture:
    """A capture of breaks alone: what the host would run between segments."""

    def __init__(self) -> None:
        self.breaks: list[Any] = []

    def end_segment(self) -> None: ...
    def begin_segment(self) -> None: ...
    def add_break(self, run: Any) -> None:
        self.breaks.append(run)


class Layers:
    """Three layers' selections, captured in a bucket of 8 rows, replayed with live batches."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.batch = Batch(8, True)
        capture = Capture()
        selection = dsa.Selection(
            lambda: SimpleNamespace(forward_batch=self.batch),
            lambda: SimpleNamespace(get_indexer_metadata=lambda layer, batch: Metadata(batch, self.log)),
        )
        self.active: Capture | None = capture
        select = Break(selection, current_capture=lambda: self.active)
        self.buffers = []
        for layer in range(3):
            topk = torch.full((8, K), -1, dtype=torch.int32)
            select(topk, Indexer(self.log), layer, torch.zeros(8, 2, 4), torch.zeros(8, 2, 1))
            self.buffers.append(topk)
        self.active = None
        self.breaks = capture.breaks
        self.staged = self.breaks[0].args[0]

    def replay(self, batch: Batch) -> list[Any]:
        """What each layer's captured attention reads."""
        self.batch = batch
        self.log.clear()
        seen = []
        for run in self.breaks:
            run()
            seen.append(self.staged.clone())
        return seen


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=6))
def test_rows_select_what_the_live_batch_says_and_padding_selects_the_padding_slot(steps: list[tuple[int, bool]]) -> None:
    """Invariant: after any sequence of replays, no layer reads a selection of an earlier batch or layer."""
    layers = Layers()
    for rows, short in steps:
        for layer, seen in enumerate(layers.replay(Batch(rows, short))):
            for row in range(8):
                if row >= rows:
                    assert seen[row].tolist() == [dsa.PADDING_SLOT, *[-1] * (K - 1)]
                elif short:
                    assert seen[row].tolist() == [10 + row] * K
                else:
                    assert seen[row].tolist() == [20 + layer] * K


def test_the_whole_context_is_selected_once_a_forward() -> None:
    """While every context is within the top k, layers after the first have nothing to do; captures always write."""
    layers = Layers()
    assert layers.log == ["whole"] * 3
    layers.replay(Batch(5, True))
    assert layers.log == ["whole"]
    layers.replay(Batch(5, False))
    assert layers.log == ["scored 0", "scored 1", "scored 2"]


def test_an_eager_call_is_never_taken_for_a_replay() -> None:
    """At warm-up the buffer is the caller's, and may be a recycled one with other contents."""
    layers = Layers()
    batch = Batch(8, True)
    layers.batch = batch
    selection = dsa.Selection(
        lambda: SimpleNamespace(forward_batch=batch),
        lambda: SimpleNamespace(get_indexer_metadata=lambda layer, batch: Metadata(batch, layers.log)),
    )
    topk = torch.full((8, K), -1, dtype=torch.int32)
    for _ in range(2):
        topk.fill_(-1)
        selection(topk, Indexer(layers.log), 0, torch.zeros(8, 2, 4), torch.zeros(8, 2, 1))
        assert topk[0].tolist() == [10] * K


# ---------------------------------------------------------------------- what stays a break

CAPTURED: dict[str, Any] = {
    "replays_any_prefix": True, "dsa_prefill_impl": "flashmla_sparse", "dsa_kv_cache_store_fp8": False,
    "use_fused_topk": True, "hisparse_coordinator": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "hierarchical", "says"),
    [
        ({}, False, None),
        ({"replays_any_prefix": False}, False, "not the DSA backend"),
        ({"dsa_prefill_impl": "flashmla_kv"}, False, "flashmla_kv"),
        ({"dsa_prefill_impl": "trtllm"}, False, "trtllm"),
        ({"dsa_kv_cache_store_fp8": True}, False, "FP8"),
        ({"use_fused_topk": False}, False, "positions"),
        ({"hisparse_coordinator": object()}, False, "translates"),
        ({}, True, "waited for"),
    ],
)
def test_attention_that_reads_more_than_static_buffers_stays_a_break(
    change: dict[str, Any], hierarchical: bool, says: str | None
) -> None:
    """Refuse to capture what would go stale: each condition has its reason."""
    why = dsa.why_not_captured(SimpleNamespace(**CAPTURED | change), hierarchical)
    assert (why is None) == (says is None)
    assert says is None or says in str(why)


def test_an_indexer_whose_store_is_not_captured() -> None:
    """Context parallelism and pools that keep account in Python leave the host's break."""
    plain = SimpleNamespace(dsa_enable_prefill_cp=False)
    assert dsa.why_indexer_not_split(plain, SimpleNamespace()) is None
    assert "context" in str(dsa.why_indexer_not_split(SimpleNamespace(dsa_enable_prefill_cp=True), SimpleNamespace()))
    assert "account" in str(dsa.why_indexer_not_split(plain, SimpleNamespace(_is_layer_owned=None)))


# ---------------------------------------------------------------------- what captured kernels read of a batch


@given(st.integers(0, 64), st.integers(1, 8), st.integers(1, 4))
def test_ranks_share_the_real_tokens(real: int, share: int, ranks: int) -> None:
    """Every real token of a bucket is counted by exactly one attention-TP rank, in the host's own way."""
    from sglang.srt.model_executor import forward_batch_info

    counts = [local_tokens(real, share, rank) for rank in range(ranks)]
    assert sum(counts) == min(real, share * ranks)
    host = forward_batch_info.compute_local_num_token_non_padded
    with pytest.MonkeyPatch.context() as patch:
        for rank in range(ranks):
            patch.setattr(
                forward_batch_info, "get_parallel", lambda rank=rank: SimpleNamespace(attn_tp_rank=rank, attn_tp_size=ranks)
            )
            # Later hosts ask whether the rows are split at all.
            split = {"sharded": True} if "sharded" in inspect.signature(host).parameters else {}
            assert int(host(torch.tensor(real), share * ranks, **split)) == counts[rank]


def feature(attention_tp: int = 1, rank: int = 0) -> AttentionFeature:
    made = AttentionFeature()
    made._kept = []
    made._seams = {}  # type: ignore[assignment]
    made._parallel = lambda: SimpleNamespace(attn_tp_size=attention_tp, attn_tp_rank=rank)
    return made


def slots(ranks: bool = True) -> Any:
    """The host's own registry of static prefill buffers."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry

    return build_prefill_registry(
        device=torch.device("cpu"), max_bs=4, max_num_token=64, cache_loc_dtype=torch.int64, is_multimodal=False,
        hidden_size=8, embed_dtype=torch.float32, enable_mamba_track=False, enable_num_token_non_padded=ranks,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("tp", "rank", "real", "mode", "expected", "split"),
    [
        (1, 0, 20, None, 20, True),
        # The host would mask rows 10 to 15 of the first rank: it divided the 20 real rows, not the bucket of 32.
        (2, 0, 20, None, 16, True),
        (2, 1, 20, None, 4, True),
        # All ranks hold all rows: nothing is divided.
        (2, 1, 20, None, 20, False),
        # S#31125: rows made up for an idle rank counted as real, and changed the other ranks' results.
        (1, 0, 20, "IDLE", 0, True),
        (1, 0, 20, "DECODE", 20, True),
    ],
)
def test_the_mask_of_padded_rows_counts_this_rank_s_real_rows(
    tp: int, rank: int, real: int, mode: str | None, expected: int, split: bool
) -> None:
    """Invariant: a captured mask leaves real rows alone and hides all others."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    registry = slots()
    runner = SimpleNamespace(buffer_registry=registry, require_mlp_tp_gather=split, require_attn_tp_gather=False)
    batch = SimpleNamespace(
        num_token_non_padded_cpu=real, forward_mode=ForwardMode.EXTEND, _original_forward_mode=mode and ForwardMode[mode]
    )
    feature(tp, rank).on_load_batch(SimpleNamespace(input_ids=torch.zeros(32)), runner, batch)
    assert registry.get_slot("num_token_non_padded").buffer.tolist() == [expected]


def test_without_expert_parallelism_there_is_no_mask() -> None:
    """A host without the slot is left alone."""
    feature().on_load_batch(None, SimpleNamespace(buffer_registry=slots(False)), None)


def test_captured_batches_are_kept() -> None:
    """Invariant: what a captured kernel reads by address lives as long as the feature, and so as the graphs."""
    import gc
    import weakref

    class Prepared:
        pass

    made, prepared = feature(), Prepared()
    alive = weakref.ref(prepared)
    made.on_capture_prepare(prepared, None, 8)
    del prepared
    gc.collect()
    assert alive() is not None


def test_a_backend_that_is_not_ours_stops_the_start() -> None:
    """Another plugin registered 'dsa' after us: not served, but named."""
    host = type("DeepseekSparseAttnBackend", (), {})
    with pytest.raises(StartupError, match="another plugin"):
        feature().on_built(None, None, SimpleNamespace(attn_backend=host(), is_draft_worker=False))
    feature().on_built(None, None, SimpleNamespace(attn_backend=host(), is_draft_worker=True))
    ours = type("DeepseekSparseAttnBackend", (), {"replays_any_prefix": True})
    feature().on_built(None, None, SimpleNamespace(attn_backend=ours(), is_draft_worker=False))
    feature().on_built(None, None, SimpleNamespace(attn_backend=object(), is_draft_worker=False))


class HostBackend:
    """The host's side of a DSA backend: what our subclass looks at."""

    use_mha = False

    def __init__(self) -> None:
        self.token_to_kv_pool = SimpleNamespace(layer_transfer_counter=None)

    def init_forward_metadata(self, batch: Any) -> None: ...


def test_what_captured_attention_cannot_do_stops_before_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense attention in a graph, or a cache that is still being filled, is refused; outside graphs both are fine."""
    empty = dataclasses.make_dataclass("DSAMetadata", [])
    backend = dsa.with_replay(HostBackend, empty)()
    backend.use_mha = True
    backend.attention_is_captured = True
    backend.token_to_kv_pool.layer_transfer_counter = object()
    backend.init_forward_metadata(None)
    monkeypatch.setattr(dsa, "in_breakable_region", lambda: True)
    with pytest.raises(CaptureError, match="dense attention"):
        backend.init_forward_metadata(None)
    backend.use_mha = False
    with pytest.raises(CaptureError, match="layer by layer"):
        backend.init_forward_metadata(None)
    backend.attention_is_captured = False
    backend.init_forward_metadata(None)


def test_the_registry_hands_out_our_subclass_under_both_names() -> None:
    """``dsa`` and its old name build a subclass that carries the host's class name."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DSAMetadata

    if NATIVE:
        assert resolve(SEAMS["attention.dsa"]) is DeepseekSparseAttnBackend
        return
    made = dsa.with_replay(DeepseekSparseAttnBackend, DSAMetadata)
    assert issubclass(made, DeepseekSparseAttnBackend)
    assert (made.__name__, made.__qualname__) == ("DeepseekSparseAttnBackend",) * 2
