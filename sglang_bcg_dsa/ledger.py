"""Counters of this rank's prefills: how often, how large, replayed or why not.

Contract: one thread counts (the scheduler's); any may read. Readers copy each mapping in one step
of the interpreter before they walk it, so that they see no mapping change size; two numbers read
one after the other may be one forward apart. Everything in :meth:`Ledger.snapshot` is a builtin
type, because hosts encode it with msgpack. Reasons are counted by bit, so the hot path neither
builds strings nor allocates; names appear in the snapshot.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from itertools import product
from statistics import median
from typing import Any, NamedTuple

from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Captured, Forward
from sglang_bcg_dsa.vote import Verdict

_KEPT = 1000
"""Forwards whose timing is kept: the first few of a process are many times slower than the rest."""


UNKNOWN = "unknown"
"""The reason of an eager forward that came without one."""


class BucketCount(NamedTuple):
    """Replays of one bucket, and the tokens they ran: real ones and padding."""

    replays: int
    real: int
    padded: int


class Ledger:
    """Counts since start, and what happened since the last :meth:`interval`."""

    def __init__(self, table: ReasonTable) -> None:
        self._table = table
        self.replayed = 0
        self.eager = 0
        self.capture_failed = 0
        self._adapter_us: deque[float] = deque(maxlen=_KEPT)
        self._against: Counter[int] = Counter()
        """Eager forwards by reason mask: few distinct masks, one dictionary update a forward."""
        self._noes: Counter[tuple[int, int]] = Counter()
        """Votes against by (DP rank, reason mask)."""
        self._buckets: Counter[int] = Counter()
        """Replays by bucket."""
        self._real: Counter[int] = Counter()
        """Real tokens of replays by bucket; the rest of each bucket was padding."""
        self._captured: dict[int, Captured] = {}
        self._marked = (0, 0)

    def count_forward(self, forward: Forward) -> None:
        """One prefill forward."""
        if forward.replay:
            self.replayed += 1
            bucket = forward.padded
            self._buckets[bucket] += 1
            self._real[bucket] += forward.tokens
        else:
            self.eager += 1
            self._against[forward.against] += 1
        self._adapter_us.append(forward.adapter_us)

    def count_verdict(self, verdict: Verdict) -> None:
        """One gathered vote; only the noes are counted."""
        if not verdict.replay:
            noes = self._noes
            for rank, _, _, yes, against in verdict.votes:
                if not yes:
                    noes[rank, against] += 1

    def count_captured(self, captured: Captured) -> None:
        """One captured bucket."""
        self._captured[captured.bucket] = captured

    def count_capture_failed(self) -> None:
        """The capture of one bucket raised."""
        self.capture_failed += 1

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
        for mask, times in list(self._against.items()):
            for name in self._table.decode(mask) or (UNKNOWN,):
                counts[name] += times
        return dict(counts.most_common())

    def first_reasons(self) -> dict[str, int]:
        """Eager forwards by the first of their reasons, so that they add up; zeros included."""
        counts = dict.fromkeys((*self._table.names, UNKNOWN), 0)
        for mask, times in list(self._against.items()):
            counts[(self._table.decode(mask) or (UNKNOWN,))[0]] += times
        return counts

    def noes_of(self, ranks: Iterable[int]) -> list[tuple[int, str, int]]:
        """Votes against as (rank, reason, votes): those there were, and zeros for the other reasons of ``ranks``."""
        counts: Counter[tuple[int, str]] = Counter(dict.fromkeys(product(ranks, self._table.names), 0))
        for (rank, mask), times in list(self._noes.items()):
            for name in self._table.decode(mask):
                counts[rank, name] += times
        return [(rank, name, votes) for (rank, name), votes in sorted(counts.items())]

    def noes(self) -> list[dict[str, Any]]:
        """Votes against by rank and reason."""
        return [{"rank": r, "reason": n, "votes": v} for r, n, v in self.noes_of(())]

    def buckets(self) -> dict[int, BucketCount]:
        """What replayed in each bucket that was captured or used, ascending."""
        replays, real = dict(self._buckets), dict(self._real)
        return {
            size: BucketCount(replays.get(size, 0), real.get(size, 0), size * replays.get(size, 0) - real.get(size, 0))
            for size in sorted({*list(self._captured), *real})
        }

    def captured(self) -> dict[int, Captured]:
        """The captured buckets, ascending."""
        return dict(sorted(dict(self._captured).items()))

    def snapshot(self) -> dict[str, Any]:
        """Everything, in builtin types."""
        used = {size: count for size, count in self.buckets().items() if count.replays}
        return {
            "prefill": {"replay": self.replayed, "eager": self.eager},
            "coverage": self.coverage,
            "reasons": self.reasons(),
            "votes_no": self.noes(),
            "tokens": {"real": sum(c.real for c in used.values()), "padded": sum(c.padded for c in used.values())},
            "buckets": {str(b): c.replays for b, c in used.items()},
            "bucket_tokens": {str(b): {"real": c.real, "padded": c.padded} for b, c in used.items()},
            "capture": {
                str(b): {"seconds": round(c.seconds, 4), "bytes": c.bytes} for b, c in self.captured().items()
            },
            "adapter_us": {
                "median": round(median(self._adapter_us), 1) if self._adapter_us else None,
                "max": round(max(self._adapter_us), 1) if self._adapter_us else None,
            },
        }
