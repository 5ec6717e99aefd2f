"""Votes and the verdict: what the ranks of a group gather, and what follows from it.

Contract: the verdict is :func:`tally` of the gathered votes and of nothing else, so it is the
same on every rank. A vote carries its reasons. Reasons ride in a column the host gathers anyway:
the host's "this rank runs a prefill" column is 0 or 1 and is only ever asked whether any rank's is
not zero, so ``1 | reasons << 1`` means the same to the host and tells us who refused and why,
without another collective and without a wider row. A rank that does not prefill has exactly one
reason to refuse, :data:`~sglang_bcg_dsa.reasons.NOT_PREFILL`, which needs no room.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_bcg_dsa import reasons
from sglang_bcg_dsa.buckets import align_up, bucket_for
from sglang_bcg_dsa.predicate import RunnerFacts


class Vote(NamedTuple):
    """One DP rank's vote on one scheduler step."""

    rank: int
    tokens: int
    """Tokens of the rank's batch, 0 when idle."""
    prefill: bool
    yes: bool
    against: int
    """Reason mask; 0 exactly when ``yes``."""


class Verdict(NamedTuple):
    """What the group does in one step. Equal on every rank."""

    step: int
    replay: bool
    prefill: bool
    """Some rank prefills. Without one, nothing is decided here."""
    bucket: int | None
    """The bucket every rank pads to, when the group replays."""
    votes: tuple[Vote, ...]
    group_against: int = 0
    """Reasons that no rank has alone: what follows from the largest batch."""

    @property
    def against(self) -> int:
        """Every reason against."""
        mask = self.group_against
        for vote in self.votes:
            mask |= vote.against
        return mask

    def noes(self) -> tuple[Vote, ...]:
        """The votes against."""
        return tuple(vote for vote in self.votes if not vote.yes)


def encode(prefill: bool, against: int) -> int:
    """The value of the prefill column: 0, or 1 with the reasons above it."""
    return 1 | against << 1 if prefill else 0


def decode(rank: int, tokens: int, column: int, yes: bool) -> Vote:
    """One gathered row back into a vote.

    A refusal without a reason comes from a rank that did not write one: it is attributed to the
    host, or to the rank's not prefilling.
    """
    if yes:
        return Vote(rank, tokens, column != 0, True, 0)
    if column == 0:
        return Vote(rank, tokens, False, False, reasons.NOT_PREFILL)
    return Vote(rank, tokens, True, False, column >> 1 or reasons.HOST)


def tally(step: int, votes: Sequence[Vote], runner: RunnerFacts | None, alignment: int = 1) -> Verdict:
    """The verdict on one step. Replay needs every rank's yes: their collectives must match.

    ``runner``: what this rank's graphs can serve, which is the same on all ranks (they compare at
    start). Token counts are aligned to ``alignment`` before they are padded, as the host does.
    """
    replay, prefill, most, bucket, group_against = True, False, 0, None, 0
    for vote in votes:
        replay = replay and vote.yes
        prefill = prefill or vote.prefill
        most = max(most, vote.tokens)
    if replay and prefill and runner is not None:
        most = align_up(most, alignment)
        bucket = bucket_for(most, runner.ladder)
        if runner.pads_to_group and runner.pads_too_much(most):
            replay, bucket, group_against = False, None, reasons.PADDING
    return Verdict(step, replay, prefill, bucket, tuple(votes), group_against)


def describe(verdict: Verdict, table: reasons.ReasonTable) -> str:
    """The votes in one line, for a message."""
    return "; ".join(
        f"DP rank {v.rank} {'yes' if v.yes else 'no (' + table.text(v.against) + ')'}, {v.tokens} tokens"
        for v in verdict.votes
    )
