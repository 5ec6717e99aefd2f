"""DeepSeek-V4 attention under breakable graphs: captured by declared policy, nothing wide in the graph.

Contract. A layer stays one break, SGLang's attention, and the break does more than SGLang's: it
first selects. In a breakable region the C4 indexer only projects: its queries, head weights and key
store are captured, and the queries wait in the segment's memory for the break, which scores and
selects with the live batch's own tables. So no score is allocated in the graph, tables have the
live batch's width and row count, and the break needs no place in a forked stream. While capturing,
the break only zeroes its output: what it would read has not been computed.

* Metadata has two halves. What captured kernels read by address (:data:`CORE`, :data:`PLAN`:
  ``COPY``) has the bucket's rows and is refreshed in place; 72 bytes a row. What the break reads
  (``REBIND``) is the live batch's, cut to its real rows, and is dropped when another batch comes:
  one batch's tables live at a time, whatever the ladder. A field without a policy stops at start.
* On a GPU one kernel writes both halves (:mod:`sglang_bcg_dsa.backends.dsv4_tables`), the first at its captured
  address, once it has shown at start that it gives what SGLang's builders give; else those build, as they do for online
  compression. The selection's schedules are SGLang's always.
* Online compression plans on the host, for the live batch: its C128 compressor leaves the segment
  as the indexer does, and its plan is rebound. A captured kernel would read the plan of capture.
* The break writes the caller's output: the real rows, and zeroes below them. A rank without tokens
  of its own gets zeroes and reads nothing, whatever request the host made up for it.
* Tensors are cut to the count of queries; none is grown: a row that nobody computed is an error.

Owned here: the live row count of the replay, what waits for the next break, and who builds tables.
Not promised: bitwise equality with an eager forward of another row count. DeepSeek-V4.1, TRT-LLM and
mega attention, context parallelism and draft models keep SGLang's own graphs (:func:`why_left_alone`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from sglang_bcg_dsa.engine import capturing, in_breakable_region
from sglang_bcg_dsa.errors import CaptureError, MetadataError
from sglang_bcg_dsa.hostfacts import is_idle
from sglang_bcg_dsa.metadata import Contract, Policy, known

if TYPE_CHECKING:
    from sglang_bcg_dsa.backends.dsv4_tables import Tables

logger = logging.getLogger(__name__)

Fields = Mapping[str, Policy]

ROWS = (
    "page_table", "raw_out_loc", "seq_lens_casual", "swa_page_indices", "swa_topk_lengths", "c4_topk_lengths_raw",
    "c4_topk_lengths_clamp1", "c4_sparse_topk_lengths", "c4_sparse_page_indices", "c4_sparse_raw_indices",
    "c128_page_indices", "c128_topk_lengths_clamp1",
)  # fmt: skip
"""Tables with one row a query, read by the break alone: cut to the real rows."""

CORE: Fields = {
    # The compressors' and the store's targets, and the rotary positions of the indexer's queries.
    **dict.fromkeys(("positions_casual", "swa_out_cache_loc", "c4_out_loc", "c128_out_loc"), Policy.COPY),
    **dict.fromkeys(ROWS, Policy.REBIND),
    # Schedules that attention makes on its first layer, and what it caches of an eager batch.
    **dict.fromkeys(("c0_flashmla_metadata", "c1_flashmla_metadata", "c2_flashmla_metadata", "c4_flashmla_metadata",
                     "c128_flashmla_metadata"), Policy.REBIND),
    **dict.fromkeys(("page_size", "cuda_int32_kwargs", "c4_sparse_topk", "index_topk", "present_ratios"), Policy.EQUAL),
    # None, or not this model's: DeepSeek-V4.1's ratios and TRT-LLM's tables.
    **dict.fromkeys((
        "low_ratios", "request_window_layout", "trtllm_swa_lens", "trtllm_c4_indices", "trtllm_c4_lens",
        "trtllm_c128_indices", "trtllm_c128_lens", "trtllm_prefill_qmeta", "trtllm_prefill_swa_lens",
        "trtllm_prefill_c4_indices", "trtllm_prefill_c128",
        *(f"c{ratio}_{name}" for ratio in (1, 2) for name in ("out_loc", "topk_lengths_clamp1", "sparse_topk_lengths",
                                                             "sparse_page_indices", "sparse_raw_indices")),
    ), Policy.EQUAL),
}  # fmt: skip
"""Policy of each field of the host's ``DSV4AttnMetadata``, on any release."""

PLAN: Fields = {
    "compress_ratio": Policy.EQUAL, "plan_c": Policy.COPY, "plan_w": Policy.COPY,
    # Keeps a host buffer alive until it was copied to the device; empty for a plan made there.
    "pin_buffer": Policy.DERIVED,
}  # fmt: skip
"""Policy of each field of the host's ``CompressorPrefillPlan``."""

WHOLE: Fields = {
    # Tables and schedules of the selection; the lazily built scaffold of sparse prefill attention.
    **dict.fromkeys(("indexer_metadata", "sparse_prefill_cache"), Policy.REBIND),
    # Scratch that the model makes inside the graph.
    **dict.fromkeys(("q_pad_buffer", "q_pad_captured"), Policy.DERIVED),
    **dict.fromkeys((
        "c1_indexer_metadata", "c2_indexer_metadata", "low_ratio_req_indices", "low_ratio_pos_i64",
        "low_ratio_extend_offsets", "low_ratio_k_slots", "low_ratio_index_plans", "candidate_metadata", "late_layer_tail",
        "prefill_graph_tail",
    ), Policy.EQUAL),
}  # fmt: skip
"""Policy of the other fields of the host's ``DSV4Metadata``."""


def contract(metadata: type, core: type, plan: type, *, online: bool) -> Contract:
    """The contract of ``DSV4Metadata`` and what it holds. Raises MetadataError for a field without a policy.

    ``online``: C128 is compressed online; its plan is then made for the live batch and rebound.
    """
    plans = Contract(plan, known(plan, PLAN))
    parts: dict[str, Policy | Contract] = {
        "core_attn_metadata": Contract(core, known(core, CORE)),
        "c4_compress_metadata": plans,
        "c128_compress_metadata": Policy.REBIND if online else plans,
    }
    return Contract(metadata, {**known(metadata, WHOLE), **parts})


def cut(name: str, tensor: torch.Tensor, queries: int) -> torch.Tensor:
    """The first ``queries`` rows. Raises MetadataError when there are fewer: rows are not invented."""
    if tensor.shape[0] < queries:
        raise MetadataError(
            f"{name} has {tensor.shape[0]} rows for {queries} queries; rows that nobody computed would be read. "
            "Pass --disable-prefill-cuda-graph and report it"
        )
    return tensor if tensor.shape[0] == queries else tensor[:queries]


def why_left_alone(backend: Any, host_class: type) -> str | None:
    """Why a backend that SGLang built keeps SGLang's own graphs, or None when ours takes its place."""
    kind: type = type(backend)
    if kind is not host_class:
        return f"the attention backend is {kind.__name__}"
    if backend.is_draft_runner:
        return "it is a draft model's"
    # Attributes of later releases; one without them has none of this.
    if getattr(backend, "low_ratios", ()) or getattr(backend, "enable_decoder_swa_bounded_replay", False):
        return "the model is DeepSeek-V4.1"
    pool = backend.token_to_kv_pool
    if getattr(pool, "request_window", None) is not None or getattr(pool, "swa_req_ring_size", None) is not None:
        return "the window of the KV cache is a ring"
    return None


def with_replay(
    base: type, captured: Contract, real_tokens: str, online: bool, make_tables: Callable[[Any, Any], Tables] | None = None
) -> type:
    """A subclass of the host's DSV4 backend for prefill graphs. It keeps the class's name.

    ``captured``: see :func:`contract`; ``real_tokens``: the field of a batch that counts its real tokens;
    ``make_tables``: makes what writes tables, given the backend and metadata that SGLang built; None: SGLang builds.
    """

    class DeepseekV4AttnBackend(base):  # type: ignore[misc]
        """The host's DSV4 backend; see :mod:`sglang_bcg_dsa.backends.dsv4`."""

        selects_in_breaks = True

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.live_rows = 0
            self.tables: Tables | None = None
            self.tables_by = "SGLang"
            """Who builds them, and why not the kernel where it was to."""
            self._unproven = make_tables
            self._building: int | None = None
            self._over: Any = None
            self._holder: Any = None
            self._waiting: dict[str, Any] = {}
            self._projected: tuple[Any, torch.Tensor] | None = None

        # -------------------------------------------------------------- metadata

        def init_forward_metadata_for_breakable_cuda_graph_capture(self, forward_batch: Any) -> Any:
            self._waiting.clear()
            if self._unproven is not None:
                make, self._unproven = self._unproven, None
                self.tables = self._proven(make, forward_batch)
            self._holder = self.forward_metadata = self._live_metadata(forward_batch, getattr(forward_batch, real_tokens))
            return self.forward_metadata

        def _proven(self, make: Callable[[Any, Any], Tables], batch: Any) -> Tables | None:
            """What writes tables, if it writes SGLang's on batches that are made up, before any request is here."""
            tables, why = None, "there is no slot for a request to try it with"
            try:
                from sglang_bcg_dsa.backends import dsv4_tables

                with dsv4_tables.made_up(batch, self.req_to_token, self._full_to_swa()) as batches:
                    for made, rows in batches:
                        host = self._live_metadata(made, rows)
                        tables = tables or make(self, host)
                        ours = self._live_metadata(made, rows, dsv4_tables.blank(host), tables)
                        field = dsv4_tables.difference(ours, host, CORE)
                        why = "" if field is None else f"{field} came out different"
                        if why:
                            break
            except Exception as error:  # whatever the kernel's compiler says: a server is up without it
                why = f"{type(error).__name__}: {error}"
            if why:
                self.tables_by = f"SGLang: {why}"
                logger.warning(
                    "sglang-bcg-dsa: SGLang builds DSV4's tables, which makes prefills about 0.5 ms slower: %s. "
                    "Answers are not affected; please report it", why,
                )  # fmt: skip
                return None
            self.tables_by = "one kernel"
            logger.info("sglang-bcg-dsa: one kernel writes DSV4's tables; SGLang's builders gave the same for %d batches",
                        len(batches))  # fmt: skip
            return tables

        def _full_to_swa(self) -> torch.Tensor:
            # Pools hold a weak proxy of the allocator's tensor.
            mapping: torch.Tensor = self.token_to_kv_pool.full_to_swa_index_mapping.detach()
            return mapping

        def prepare_forward_metadata_for_breakable_cuda_graph_replay(
            self, capture_metadata: Any, forward_batch: Any, *, static_forward_batch: Any = None
        ) -> None:
            padded = forward_batch if static_forward_batch is None else static_forward_batch
            rows = 0 if is_idle(forward_batch) else getattr(padded, real_tokens)
            live = self._live_metadata(padded, rows, capture_metadata, self.tables)
            captured.refresh(capture_metadata, live)
            self._holder = self.forward_metadata = capture_metadata
            pool = self.token_to_kv_pool
            if pool.layer_transfer_counter is not None:
                # Captured compressors read their states of a cached prefix and do not wait for each layer.
                pool.wait_layer_transfer(pool.start_layer + pool.layer_num - 1)

        def _live_metadata(self, batch: Any, rows: int, over: Any = None, tables: Tables | None = None) -> Any:
            """Metadata at the width of the batch, with bucket rows where it is copied, else real rows.

            With ``tables``, what is copied is already refreshed: its tensors are those of ``over``.
            """
            if self._holder is not None:
                captured.release(self._holder)
                self._holder = None
            self.live_rows = rows
            width = 1 if batch.seq_lens_cpu is None else max(batch.seq_lens_cpu.tolist(), default=1)
            self._building, self._over = max(rows, 1), None if tables is None else (tables, over)
            try:
                found = self._build_forward_metadata(batch, max_seq_len_override=width, use_prefill_cuda_graph=True)
            finally:
                self._building = self._over = None
            if tables is None:
                target = self.token_to_kv_pool.translate_loc_from_full_to_swa(batch.out_cache_loc)
                found.core_attn_metadata.swa_out_cache_loc = target.to(torch.int32)
            return found

        def init_forward_metadata_prefill(self, *args: Any, **given: Any) -> Any:
            if self._over is None or self._building is None:
                return super().init_forward_metadata_prefill(*args, **given)
            tables, over = self._over
            live = tables.write(over, given, req_to_token=self.req_to_token, full_to_swa=self._full_to_swa(), live=self._building)
            live.indexer_metadata = self.init_forward_metadata_indexer(live.core_attn_metadata)
            return live

        def make_core_attn_metadata(self, **given: Any) -> Any:
            core = super().make_core_attn_metadata(**given)
            if self._building is not None:
                # Before the selection's schedules are made from them: those are for the real rows too.
                for name in ROWS:
                    table = getattr(core, name, None)
                    if table is not None:
                        setattr(core, name, cut(name, table, self._building))
            return core

        def init_forward_metadata_indexer(self, core_attn_metadata: Any, **how: Any) -> Any:
            if self._building is not None:
                how["use_prefill_cuda_graph"] = False
            return super().init_forward_metadata_indexer(core_attn_metadata, **how)

        # -------------------------------------------------------------- in a segment

        def in_prefill_graph(self) -> bool:
            """Whether a prefill graph is warmed up or captured. Breakable decode graphs also verify drafts, in a mode that
            counts as a prefill: their metadata was not made here, and no live rows belong to it."""
            return in_breakable_region() and self._holder is not None and self.forward_metadata is self._holder

        def forward_c4_indexer(self, x: Any, q_lora: Any, c4_indexer: Any, forward_batch: Any, **how: Any) -> None:
            if not self.in_prefill_graph():
                super().forward_c4_indexer(x=x, q_lora=q_lora, c4_indexer=c4_indexer, forward_batch=forward_batch, **how)
                return
            queries = x.shape[0]
            given = {
                "x": x, "q_lora": cut("q_lora", q_lora, queries), "c4_indexer": c4_indexer, "forward_batch": forward_batch,
                "positions": cut("positions", self.forward_metadata.core_metadata.positions, queries),
            }  # fmt: skip
            alt_streams, ready = how.pop("alt_streams", None), how.pop("q_lora_ready", None)
            if how.pop("enable_multi_stream", False):
                q, weights = self._forward_prepare_multi_stream(**given, alt_streams=alt_streams, q_lora_ready=ready)
            else:
                q, weights = self._forward_prepare_normal(**given, **how)
            self._wait("select", c4_indexer.layer_id, (c4_indexer, q, weights))

        def forward_core_compressor(self, x: Any, forward_batch: Any, layer_id: int, compressor: Any) -> None:
            if online and compressor.ratio == 128 and self.in_prefill_graph():
                self._wait("compress", layer_id, (compressor, compressor.compute_kv_score(x, forward_batch)))
            else:
                super().forward_core_compressor(x, forward_batch, layer_id, compressor)

        def _wait(self, what: str, layer_id: int, work: tuple[Any, ...]) -> None:
            if what in self._waiting:
                raise CaptureError(f"layer {layer_id} left work to its attention break, but the last layer's was not done")
            self._waiting[what] = work

        def take(self, layer_id: int, compress_ratio: int) -> dict[str, Any]:
            """What the layer left to its break. Raises CaptureError when a C4 layer has selected nothing."""
            taken, self._waiting = self._waiting, {}
            if compress_ratio == 4 and "select" not in taken:
                raise CaptureError(
                    f"layer {layer_id} attends over selected blocks, but its indexer did not run in the segment before; "
                    "pass --disable-prefill-cuda-graph and report it"
                )
            return taken

        # -------------------------------------------------------------- in a break

        def finish(self, layer_id: int, forward_batch: Any, select: Any, compress: Any) -> None:
            """Do what the layer left: write its compressed keys, select its blocks; for the live rows."""
            if compress is not None:
                compressor, scores = compress
                scored = _Scored(compressor, cut("kv_score", scores, self.live_rows))
                super().forward_core_compressor(scores, forward_batch, layer_id, scored)
            if select is not None:
                indexer, q, weights = select
                parts = [cut("q", part, self.live_rows) for part in (q if isinstance(q, tuple) else (q,))]
                self._projected = (tuple(parts) if isinstance(q, tuple) else parts[0], cut("weights", weights, self.live_rows))
                try:
                    super().forward_c4_indexer(
                        x=parts[0], q_lora=parts[0], c4_indexer=indexer, forward_batch=forward_batch
                    )
                finally:
                    self._projected = None

        def _forward_prepare_normal(self, *args: Any, **kwargs: Any) -> Any:
            # The host scores right after it projects; in a break the segment has projected.
            if self._projected is not None:
                return self._projected
            return super()._forward_prepare_normal(*args, **kwargs)

    DeepseekV4AttnBackend.__qualname__ = base.__qualname__
    return DeepseekV4AttnBackend


class _Scored:
    """A compressor whose scores a segment has made."""

    def __init__(self, compressor: Any, scores: torch.Tensor) -> None:
        self._compressor = compressor
        self._scores = scores

    def compute_kv_score(self, x: Any, forward_batch: Any) -> torch.Tensor:
        """The scores of the live rows."""
        return self._scores

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compressor, name)


class Attention:
    """The body of a layer's break: what the layer left, attention over the real rows, zeroes below."""

    def __init__(self, attend: Callable[..., None], get_context: Callable[[], Any], get_backend: Callable[[], Any]) -> None:
        self._host_attend = attend
        self._get_context = get_context
        self._get_backend = get_backend

    def attend(
        self, query: torch.Tensor, key_value: torch.Tensor, output: torch.Tensor, layer_id: int, compress_ratio: int,
        attn_sink: torch.Tensor, save_kv_cache: bool, select: Any = None, compress: Any = None,
    ) -> None:  # fmt: skip
        """Write ``output`` ``[bucket, heads, dim]`` from ``query`` ``[bucket, heads, dim]``."""
        if capturing():
            output.zero_()
            return
        backend = self._get_backend()
        if backend.live_rows:
            backend.finish(layer_id, self._get_context().forward_batch, select, compress)
            self._host_attend(query, key_value, output, layer_id, compress_ratio, attn_sink, save_kv_cache)
        output[backend.live_rows :].zero_()
