"""DSA attention (DeepSeek-V3.2, GLM-5) under breakable graphs: only the top-k selection is a break.

Contract. In a breakable region a layer's indexer is split in two. Its projections, the quantisation
of its queries and the store of its keys are captured: they read the batch's static buffers. What
depends on the lengths of the batch, scoring the keys and selecting the top k, is a break that
writes a static buffer. The attention over the selected slots is captured too, where it reads
nothing but that buffer, the queries and the KV cache (:func:`why_not_captured`); elsewhere it stays
the host's break. Prefixes of any length are fine: the sparse path is the same with and without.

* A row of the top-k buffer is -1 beyond what was selected. A padded row selects slot 0 alone, the
  host's padding slot, so that its attention is defined and reads no request's KV. Padded rows also
  write there and nowhere else: the host pads slot numbers with 0.
* While every context is within the top k there is nothing to select: all layers attend to the whole
  context, the same for each. It is written by the first layer of a replay and left in place by the
  others (measured, H200, 6 layers: the host's break takes 0.7 ms a layer, most of it launches).
* Metadata objects are read in breaks only, so a replay may replace them. Their fields are declared
  in :data:`POLICIES`; a field that is not stops at start.

Owned here: the top-k buffer (in the staging of the break) and whose selection it holds.
Not promised: bitwise equality with an eager forward of another row count; dense matrix kernels
round by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from sglang_bcg_dsa.breaks import Break, replaying
from sglang_bcg_dsa.engine import current_capture, in_breakable_region
from sglang_bcg_dsa.errors import CaptureError
from sglang_bcg_dsa.metadata import Contract, Policy, known

PADDING_SLOT = 0
"""KV slot that no request gets; the host pads ``out_cache_loc`` with it."""

POLICIES = {"page_size": Policy.EQUAL, **dict.fromkeys((
    "cache_seqlens_int32", "max_seq_len_q", "max_seq_len_k", "cu_seqlens_q", "cu_seqlens_k", "page_table_1",
    "real_page_table", "dsa_cache_seqlens_int32", "dsa_cu_seqlens_q", "dsa_cu_seqlens_k", "dsa_extend_seq_lens_list",
    "dsa_seqlens_expanded", "dsa_max_seqlen_q", "flashmla_metadata", "paged_mqa_schedule_metadata",
    "paged_mqa_ctx_lens_2d", "topk_v2_plan", "seq_lens_sum", "page_table_1_flattened", "topk_indices_offset",
    "indexer_k_start_end", "indexer_seq_lens_cpu", "indexer_seq_lens", "token_to_batch_idx",
), Policy.REBIND)}  # fmt: skip
"""Policy of each field of the host's ``DSAMetadata`` under prefill graphs."""


def contract(metadata_class: type) -> Contract:
    """The contract of the host's ``DSAMetadata``. Raises MetadataError for a field without a policy."""
    return Contract(metadata_class, known(metadata_class, POLICIES))


def with_replay(base: type, metadata_class: type) -> type:
    """A subclass of the host's DSA backend for prefill graphs. It keeps the class's name."""
    contract(metadata_class)

    class DeepseekSparseAttnBackend(base):  # type: ignore[misc]
        """The host's DSA backend; see :mod:`sglang_bcg_dsa.backends.dsa`."""

        replays_any_prefix = True
        attention_is_captured = False

        def init_forward_metadata(self, forward_batch: Any) -> None:
            super().init_forward_metadata(forward_batch)
            if not in_breakable_region():
                return
            if self.use_mha:
                raise CaptureError(
                    "SGLang chose dense attention for a prefill graph of a DSA model; captured segments hold the "
                    "sparse path only. Pass --disable-prefill-cuda-graph and report it"
                )
            if self.attention_is_captured and self.token_to_kv_pool.layer_transfer_counter is not None:
                raise CaptureError(
                    "the KV cache is filled layer by layer and waited for in Python, which captured attention does "
                    "not do: it could read before the data is there. Pass --disable-prefill-cuda-graph, or set "
                    "[attention] enabled = false, and report which cache it is"
                )

    DeepseekSparseAttnBackend.__qualname__ = base.__qualname__
    return DeepseekSparseAttnBackend


def why_not_captured(backend: Any, waited_for: bool) -> str | None:
    """Why the attention over the selected slots has to stay a break, or None when it is captured."""
    if not getattr(backend, "replays_any_prefix", False):
        return "the attention backend is not the DSA backend"
    if backend.dsa_prefill_impl != "flashmla_sparse":
        return f"the prefill implementation {backend.dsa_prefill_impl} reads lengths of the batch"
    if backend.dsa_kv_cache_store_fp8:
        return "an FP8 KV cache is gathered and dequantised by the lengths of the batch"
    if not backend.use_fused_topk:
        return "the top-k selection does not give slots, but positions"
    if backend.hisparse_coordinator is not None:
        return "a sparse host cache translates slots at each forward"
    if waited_for:
        return "the KV cache may be waited for in Python, layer by layer"
    return None


def why_indexer_not_split(indexer: Any, pool: Any) -> str | None:
    """Why an indexer's key store cannot be captured, or None when it can."""
    if indexer.dsa_enable_prefill_cp:
        return "context parallelism gathers keys by the lengths of the batch"
    if hasattr(pool, "_is_layer_owned"):
        return "the KV pool keeps account of stored layers in Python"
    return None


class Selection:
    """Scores keys and selects the top k for each row: the body of the indexer's break."""

    def __init__(self, get_context: Callable[[], Any], get_backend: Callable[[], Any]) -> None:
        self._get_context = get_context
        self._get_backend = get_backend
        self._whole: tuple[Any, int] | None = None
        """Metadata of the replay, and address of the buffer, whose rows hold the whole context."""

    def __call__(self, topk: torch.Tensor, indexer: Any, layer_id: int, q_fp8: torch.Tensor, weights: torch.Tensor) -> None:
        """Write ``topk`` ``[bucket, k]`` int32 from ``q_fp8`` ``[bucket, heads, dim]`` and ``weights``
        ``[bucket, heads, 1]`` float32, for as many rows as the live batch has."""
        batch = self._get_context().forward_batch
        metadata = self._get_backend().get_indexer_metadata(layer_id, batch)
        rows = metadata.get_seqlens_expanded().shape[0]
        if not rows:
            self._whole = None
            topk.fill_(-1)
        elif indexer._should_skip_logits_computation(batch):
            key = (metadata.attn_metadata, topk.data_ptr())
            if replaying() and self._whole is not None and self._whole[0] is key[0] and self._whole[1] == key[1]:
                return
            topk.fill_(-1)
            scores = torch.zeros(rows, topk.shape[1], dtype=torch.float32, device=topk.device)
            topk[:rows] = metadata.topk_transform(scores, topk.shape[1])
            self._whole = key
        else:
            self._whole = None
            topk.fill_(-1)
            indexer._get_topk_ragged(False, batch, layer_id, q_fp8[:rows], weights[:rows], metadata, topk)
        topk[rows:, 0] = PADDING_SLOT


def make_break(selection: Selection) -> Break:
    """The indexer's break. It is not coupled to other ranks: no stub, no barrier."""
    return Break(selection, current_capture=current_capture)


def project_and_store(
    indexer: Any, batch: Any, layer_id: int, x: Any, q_lora: Any, positions: torch.Tensor, act_quant: Callable[..., Any]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The captured part of an indexer: store the keys of all rows, return ``q_fp8`` and ``weights``."""
    if indexer.use_dsa_indexer_fusion:
        found: tuple[torch.Tensor, torch.Tensor] = indexer._fused_q_prepare_and_store(
            x, q_lora, positions, batch, layer_id, act_quant, enable_dual_stream=False
        )
        return found
    query, key, _ = indexer._get_q_k_bf16(q_lora, x, positions, enable_dual_stream=False, forward_batch=batch)
    indexer._store_index_k_cache(forward_batch=batch, layer_id=layer_id, key=key, act_quant=act_quant)
    q_fp8, q_scale = act_quant(query, indexer.block_size, indexer.scale_fmt)
    return q_fp8, indexer._get_logits_head_gate(x, q_scale)
