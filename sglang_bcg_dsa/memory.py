"""Memory of DeepSeek-V4's prefill graphs, computed from ladder and context: pure, no host import.

Contract: an estimate in MiB of one rank's device memory beyond weights, KV cache and what SGLang
sets aside. Captured activations are counted at a layer's widest point; every bucket uses the same
pool, so the largest counts. A batch's tables and scores are not captured: they are as wide as its
longest context, here the model's. Computed; DeepSeek-V4's shape took 0.57 GiB at 2048 tokens on an H200.
What a release's kernels take themselves is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PAGE, HEAD, INDEX_HEAD, WINDOW = 256, 512, 128, 128
"""Tokens of a page, widths of a head and of an indexer's, tokens of the window: fixed in the model's kernels."""
COPIED_BYTES = 72
"""Metadata that captured kernels read, for each row of each bucket (``backends.dsv4``)."""
_MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What of a model and its host the estimate needs."""

    hidden: int
    streams: int
    """Residual streams."""
    heads: int
    """Of one rank, as the attention kernel pads them."""
    index_heads: int
    topk: int
    chunked: bool
    """The host scores a large batch in chunks of rows."""
    wide_draft: bool = False
    """A draft model is captured too, by the host, which keeps tables of the whole context for each bucket."""


@dataclass(frozen=True)
class Shortage:
    """Graphs do not fit: MiB they want, MiB that are missing, and what would fit instead; None where nothing does."""

    need: float
    missing: float
    tokens: int | None
    """Largest bucket of the ladder that fits."""
    context: int | None
    """Longest context with the whole ladder."""


def scores_mb(tokens: int, context: int) -> float:
    """Scores of the C4 indexer: float32, one for each row and group of four tokens, rows padded to 256 columns.

    SGLang's own graphs pin them for the largest bucket at the model's full context.
    """
    return tokens * _up(_up(context, PAGE) // 4, 256) * 4 / _MIB


def graph_mb(ladder: Sequence[int], shape: Shape) -> float:
    """What stays in graphs of this ladder: activations of the largest bucket, copied metadata of all."""
    # Streams before and after and what they are mixed from, the layer's input and its norm, queries and outputs.
    values = 3 * shape.streams * shape.hidden + 2 * shape.hidden + 2 * shape.heads * HEAD
    row = 2 * values + shape.index_heads * (INDEX_HEAD + 4)
    return (max(ladder) * row + sum(ladder) * COPIED_BYTES) / _MIB


def tables_mb(tokens: int, context: int, shape: Shape) -> float:
    """Tables of one live batch: pages, blocks of 128, window, selected slots twice; int32."""
    pages = _up(context, PAGE) // PAGE
    return tokens * 4 * (pages + _up(2 * pages, 64) + WINDOW + 2 * shape.topk) / _MIB


def draft_mb(ladder: Sequence[int], context: int, shape: Shape) -> float:
    """What the host's graphs of a draft model keep: tables of every bucket. Its layer compresses and scores nothing."""
    return tables_mb(sum(ladder), context, shape) if shape.wide_draft else 0.0


def need_mb(ladder: Sequence[int], context: int, shape: Shape) -> float:
    """All of it while the largest bucket replays a batch at full context."""
    largest = max(ladder)
    scores = 0.0 if shape.chunked else scores_mb(largest, context)
    return graph_mb(ladder, shape) + tables_mb(largest, context, shape) + draft_mb(ladder, context, shape) + scores


def shortage(left: float, ladder: Sequence[int], context: int, shape: Shape) -> Shortage | None:
    """None when ``left`` MiB suffice, else what is missing and the nearest that fits."""
    need = need_mb(ladder, context, shape)
    if need <= left:
        return None
    buckets = [n for n in ladder if need_mb([m for m in ladder if m <= n], context, shape) <= left]
    contexts = [n for n in (context >> i for i in range(1, 32)) if n >= PAGE and need_mb(ladder, n, shape) <= left]
    return Shortage(need, need - left, max(buckets, default=None), max(contexts, default=None))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
