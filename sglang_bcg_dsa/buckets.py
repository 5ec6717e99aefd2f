"""Token buckets as pure integers: the ladder that is captured, and the bucket a batch pads to.

Contract: a ladder is a non-empty, strictly ascending tuple of positive token counts. Every
function here is total on valid input and raises ValueError, with the offending value, otherwise.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import pairwise

Ladder = tuple[int, ...]


def ladder(sizes: Iterable[int]) -> Ladder:
    """Check a ladder given by a user or a host, and freeze it.

    Raises ValueError for an empty, unsorted or repeated list and for sizes below 1: SGLang sorts
    some of these silently and fails on others only while capturing.
    """
    found = tuple(sizes)
    if not found:
        raise ValueError("the ladder is empty; give at least one bucket, in tokens")
    for size in found:
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"bucket {size!r} is not a whole number of tokens")  # noqa: TRY004 - one kind of error
        if size < 1:
            raise ValueError(f"bucket {size} is below 1 token")
    for low, high in pairwise(found):
        if low == high:
            raise ValueError(f"bucket {low} stands twice in the ladder")
        if low > high:
            raise ValueError(f"the ladder is not ascending: {high} follows {low}")
    return found


def align_up(tokens: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``tokens`` (0 stays 0)."""
    if multiple < 1:
        raise ValueError(f"cannot align to {multiple}; expected at least 1")
    return -(-tokens // multiple) * multiple


def align_down(tokens: int, multiple: int) -> int:
    """The largest multiple of ``multiple`` that is not above ``tokens``."""
    if multiple < 1:
        raise ValueError(f"cannot align to {multiple}; expected at least 1")
    return tokens // multiple * multiple


DEEPEP_MULTIPLE = 8
"""DeepEP's dispatch can hang on prefill buckets that are no multiple of it (SGLang's own note)."""


def deepep_multiple(attention_tp: int) -> int:
    """What prefill buckets must be a multiple of with DeepEP.

    A bucket counts the tokens of one attention-TP group; each of its ``attention_tp`` ranks
    dispatches an equal share, so the bucket must also divide by their number.
    """
    return math.lcm(DEEPEP_MULTIPLE, attention_tp)


def aligned(sizes: Sequence[int], multiple: int) -> Ladder:
    """The ladder with every bucket rounded up to a multiple, duplicates merged.

    Rounding up never shrinks the ceiling, so a batch that fitted the ladder still fits.
    """
    return tuple(sorted({align_up(size, multiple) for size in sizes}))


def fitted(sizes: Sequence[int], multiple: int, ceiling: int) -> Ladder:
    """The aligned ladder with what is above ``ceiling``, itself a multiple, brought down to it."""
    return tuple(sorted({min(size, ceiling) for size in aligned(sizes, multiple)}))


def bucket_for(tokens: int, sizes: Sequence[int]) -> int | None:
    """The smallest bucket that holds ``tokens``, or None when the batch is above the ladder.

    ``sizes`` must be ascending. Zero tokens pad to the smallest bucket (an idle rank).
    """
    index = bisect_left(sizes, tokens)
    return sizes[index] if index < len(sizes) else None
