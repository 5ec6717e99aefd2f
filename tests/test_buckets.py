"""Buckets: what is captured and what a batch pads to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa.buckets import align_up, aligned, bucket_for, ladder

ladders = st.sets(st.integers(1, 20_000), min_size=1, max_size=60).map(lambda s: tuple(sorted(s)))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([], "empty"),
        ([16, 8], "not ascending: 8 follows 16"),
        ([0, 8], "bucket 0 is below 1"),
        ([-4], "bucket -4 is below 1"),
        ([8, 8], "bucket 8 stands twice"),
        ([8.0], "not a whole number"),
        ([True], "not a whole number"),
    ],
)
def test_a_bad_ladder_is_refused_by_name(sizes: list[int], message: str) -> None:
    """A ladder is ascending, positive and without repeats, or an error says which bucket is not."""
    with pytest.raises(ValueError, match=message):
        ladder(sizes)


@given(ladders, st.integers(0, 25_000))
def test_the_bucket_is_the_smallest_that_holds_the_batch(sizes: tuple[int, ...], tokens: int) -> None:
    """No batch pads further than it must, and none is put into a bucket that is too small."""
    assert bucket_for(tokens, sizes) == min((s for s in sizes if s >= tokens), default=None)


@given(ladders, st.integers(1, 128))
def test_alignment_never_shrinks_the_ceiling(sizes: tuple[int, ...], multiple: int) -> None:
    """Every aligned bucket divides; whatever fitted the ladder fits it still."""
    found = aligned(sizes, multiple)
    assert found == ladder(found)
    assert all(size % multiple == 0 for size in found)
    assert found[-1] >= sizes[-1]
    assert found[-1] - sizes[-1] < multiple


def test_the_issue_s_unaligned_ladder() -> None:
    """[7, 9] for DeepEP's multiple of 8 is [8, 16], not [0, 8] and not an error."""
    assert aligned([7, 9], 8) == (8, 16)


def test_alignment_needs_a_multiple() -> None:
    """Zero is refused instead of dividing by it."""
    with pytest.raises(ValueError, match="cannot align to 0"):
        align_up(5, 0)
