"""The CPU platform's attention backend: plain attention, one request at a time.

Contract: rows beyond the batch's requests (a bucket's padding) come out as zeros and write no KV; a
row's result does not depend on the other requests of the batch, on how its prompt was cut into
chunks, or on how much of it came from the prefix cache.

It runs in breaks and therefore reads lengths on the host; inside a captured segment the tape
refuses that. Sliding windows, cross attention and attention sinks are refused rather than
ignored.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, logit_cap: float) -> Tensor:
    """Causal attention of one request.

    ``q`` [rows, heads, d] are the rows at positions ``first...``; ``k`` and ``v`` hold positions
    ``0...``, with fewer heads under GQA.
    """
    group = q.shape[1] // k.shape[1]
    keys = k.to(q.dtype).repeat_interleave(group, dim=1).permute(1, 2, 0)
    values = v.to(q.dtype).repeat_interleave(group, dim=1).transpose(0, 1)
    scores = torch.bmm(q.transpose(0, 1), keys) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    ahead = torch.arange(k.shape[0]) > torch.arange(first, first + q.shape[0])[:, None]
    # Double: the order of summation over the keys then does not show in the result.
    weights = torch.softmax(scores.masked_fill(ahead, float("-inf")).double(), dim=-1)
    return torch.bmm(weights.to(q.dtype), values).transpose(0, 1)


class CpuAttentionBackend(AttentionBackend):  # type: ignore[misc]
    """Registered under a name of its own: the host turns graphs off for its native backend."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        self.forward_metadata = None
        # Models reach the pools through these names.
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """There is none: the batch itself is read at each call."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """There is none."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        return 1

    def support_triton(self) -> bool:
        return False

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        lengths = forward_batch.extend_seq_lens.tolist()
        prefixes = forward_batch.extend_prefix_lens.tolist()
        spans = list(zip(prefixes, lengths, strict=True))
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, spans, kwargs)

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        spans = [(length - 1, 1) for length in forward_batch.seq_lens.tolist()]
        return self._run(q, k, v, layer, forward_batch, save_kv_cache, spans, kwargs)

    def _run(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        batch: Any,
        save: bool,
        spans: list[tuple[int, int]],
        extra: dict[str, Any],
    ) -> Tensor:
        self._refuse_unsupported(layer, extra)
        tokens = q.shape[0]
        q = _with_rope(q, extra.get("q_rope"), layer.tp_q_head_num)
        if save and k is not None and v is not None:
            k = _with_rope(k, extra.get("k_rope"), layer.tp_k_head_num)
            v = v.view(tokens, layer.tp_v_head_num, -1)
            slots = batch.out_cache_loc[:tokens]
            self.token_to_kv_pool.set_kv_buffer(layer, slots, k[: len(slots)], v[: len(slots)])
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        out = q.new_zeros(tokens, layer.tp_q_head_num, layer.v_head_dim)
        start = 0
        for row, (first, count) in zip(batch.req_pool_indices.tolist(), spans, strict=False):
            end = min(start + count, tokens)
            if end > start:
                slots = self.req_to_token_pool.req_to_token[row, : first + count].long()
                out[start:end] = attend(
                    q[start:end], keys[slots], values[slots], first, layer.scaling, layer.logit_cap
                )
            start = end
        return out.view(tokens, -1)

    @staticmethod
    def _refuse_unsupported(layer: Any, extra: dict[str, Any]) -> None:
        unknown = sorted(
            name
            for name, value in extra.items()
            if name not in ("q_rope", "k_rope") and value is not None
        )
        if unknown:
            raise NotImplementedError(f"CPU attention got {unknown}, which it does not implement")
        window = layer.sliding_window_size
        if layer.is_cross_attention or (window is not None and window > -1):
            raise NotImplementedError(
                "CPU attention has neither cross attention nor sliding windows"
            )
        if layer.attn_type != AttentionType.DECODER:
            raise NotImplementedError(f"CPU attention is causal only, not {layer.attn_type}")


def _with_rope(x: Tensor, rope: Tensor | None, heads: int) -> Tensor:
    """``x`` by heads; MLA hands over the rotary part of each head separately."""
    x = x.view(x.shape[0], heads, -1)
    return x if rope is None else torch.cat([x, rope.view(x.shape[0], heads, -1)], dim=-1)
