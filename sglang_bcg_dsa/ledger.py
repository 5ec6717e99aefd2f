"""Counters of this rank's prefills: how often, how large, replayed or why not.

Contract: one owner, one thread (the scheduler's). Everything in :meth:`Ledger.snapshot` is a
builtin type, because hosts encode it with msgpack. Reasons are counted by bit, so the hot path
neither builds strings nor allocates; names appear in the snapshot.
"""

from __future__ import annotations

from collections import Counter, deque
from statistics import median
from typing import Any

from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Captured, Forward
from sglang_bcg_dsa.vote import Verdict

_KEPT = 1000
"""Forwards whose timing is kept: the first few of a process are many times slower than the rest."""


class Ledger:
    """Counts since start, and what happened since the last :meth:`interval`."""

    def __init__(self, table: ReasonTable) -> None:
        self._table = table
        self.replayed = 0
        self.eager = 0
        self.real_tokens = 0
        self.padded_tokens = 0
        self._adapter_us: deque[float] = deque(maxlen=_KEPT)
        self._against: Counter[int] = Counter()
        """Eager forwards by reason mask: few distinct masks, one dictionary update a forward."""
        self._noes: Counter[tuple[int, int]] = Counter()
        """Votes against by (DP rank, reason mask)."""
        self._buckets: Counter[int] = Counter()
        self._captured: dict[int, Captured] = {}
        self._marked = (0, 0)

    def count_forward(self, forward: Forward) -> None:
        """One prefill forward."""
        if forward.replay:
            self.replayed += 1
            self._buckets[forward.bucket or 0] += 1
            self.real_tokens += forward.tokens
            self.padded_tokens += forward.padded - forward.tokens
        else:
            self.eager += 1
            self._against[forward.against] += 1
        self._adapter_us.append(forward.adapter_us)

    def count_verdict(self, verdict: Verdict) -> None:
        """One gathered vote; only the noes are counted."""
        if not verdict.replay:
            for vote in verdict.votes:
                if not vote.yes:
                    self._noes[vote.rank, vote.against] += 1

    def count_captured(self, captured: Captured) -> None:
        """One captured bucket."""
        self._captured[captured.bucket] = captured

    @property
    def forwards(self) -> int:
        """Prefill forwards so far."""
        return self.replayed + self.eager

    @property
    def coverage(self) -> float | None:
        """Share of prefill forwards that replayed, or None before the first."""
        return self.replayed / self.forwards if self.forwards else None

    def interval(self) -> tuple[int, int]:
        """(replayed, eager) since the last call."""
        now = (self.replayed, self.eager)
        before, self._marked = self._marked, now
        return now[0] - before[0], now[1] - before[1]

    def reasons(self) -> dict[str, int]:
        """Eager forwards by reason, most frequent first; one forward can count for several."""
        counts: Counter[str] = Counter()
        for mask, times in self._against.items():
            for name in self._table.decode(mask) or ("unknown",):
                counts[name] += times
        return dict(counts.most_common())

    def noes(self) -> list[dict[str, Any]]:
        """Votes against by rank and reason."""
        counts: Counter[tuple[int, str]] = Counter()
        for (rank, mask), times in self._noes.items():
            for name in self._table.decode(mask):
                counts[rank, name] += times
        return [{"rank": r, "reason": n, "votes": v} for (r, n), v in sorted(counts.items())]

    def snapshot(self) -> dict[str, Any]:
        """Everything, in builtin types."""
        return {
            "prefill": {"replay": self.replayed, "eager": self.eager},
            "coverage": self.coverage,
            "reasons": self.reasons(),
            "votes_no": self.noes(),
            "tokens": {"real": self.real_tokens, "padded": self.padded_tokens},
            "buckets": {str(b): n for b, n in sorted(self._buckets.items())},
            "capture": {
                str(b): {"seconds": round(c.seconds, 4), "bytes": c.bytes} for b, c in sorted(self._captured.items())
            },
            "adapter_us": {
                "median": round(median(self._adapter_us), 1) if self._adapter_us else None,
                "max": round(max(self._adapter_us), 1) if self._adapter_us else None,
            },
        }
