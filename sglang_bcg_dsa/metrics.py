"""The ledger as Prometheus series under SGLang's ``/metrics``.

Contract: nothing here runs on the scheduler's thread but the registration at start. A thread
carries what the ledger counted since its last turn into prometheus_client once a second; so the
last forwards appear although traffic stops, and how long ago a rank voted appears while its
scheduler is stuck, in the vote or in another collective. SGLang's processes share a folder of memory-mapped values
(PROMETHEUS_MULTIPROC_DIR): prometheus_client reads that name when it is imported, so it is imported
here late, in a process whose SGLang has just done the same.

Labels are SGLang's own and ours. Ours are bounded: reasons are those of the table, ranks those of
the group, buckets those of the ladder. Every series whose labels are known exists from the start,
at zero, so that ``increase()`` sees the first event. Sums mean something: a forward is counted once,
under the first of its reasons; the votes of all ranks are counted by TP rank 0 alone, of the ranks that
share DP rank 0; it is on the node that serves ``/metrics``.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.stopping import refuse

logger = logging.getLogger(__name__)

PREFIX: Final = "sglang:bcg_dsa_"
COUNTERS: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "prefill_total": (
        "Prefill forwards of this rank by path (replay, eager) and, for eager ones, the first reason against.",
        ("path", "reason"),
    ),
    "tokens_total": (
        "Tokens of replayed prefills by bucket and kind: real ones, and padded rows beside them.",
        ("kind", "bucket"),
    ),
    "bucket_total": ("Replayed prefills by bucket.", ("bucket",)),
    "vote_no_total": (
        "Votes against replay by DP rank and reason; one vote counts under each of its reasons.", ("rank", "reason"),
    ),
    "capture_failed_total": ("Captures of a bucket that raised.", ()),
}  # fmt: skip
GAUGES: Final[dict[str, tuple[str, tuple[str, ...]]]] = {
    "capture_seconds": ("Time the capture of a bucket took, warm-ups included.", ("bucket",)),
    "capture_bytes": ("Device memory the capture of a bucket took.", ("bucket",)),
    "vote_waiting_seconds": (
        "Time since this rank began its last vote, which ranks do at every step; 0 below a second and where none votes.", (),
    ),
}  # fmt: skip
INTERVAL: Final = 1.0
"""Seconds between two turns: below any scrape interval."""


class Exporter:
    """Carries one ledger into prometheus_client. :meth:`flush` is called by one thread at a time."""

    def __init__(self, ledger: Ledger, progress: Progress, labels: Mapping[str, Any], voters: Callable[[], int]) -> None:
        """``labels``: SGLang's, with values. ``voters``: how many DP ranks' votes are counted here; asked once this rank
        has voted, because SGLang makes its groups after its metrics.

        Raises StartupError when one of SGLang's labels, which users may add to, has a name of ours.
        """
        from prometheus_client import Counter, Gauge

        ours = {name for _, names in (*COUNTERS.values(), *GAUGES.values()) for name in names}
        if clash := sorted(ours & set(labels)):
            raise refuse(
                f"--extra-metric-labels names {', '.join(clash)}, which the plugin's own metrics use; "
                "choose other names, or set [explain] enabled = false"
            )
        self._ledger = ledger
        self._progress = progress
        self._labels = dict(labels)
        self._ask_voters = voters
        self._voters: int | None = None
        self._metrics: dict[str, Any] = {
            name: Counter(PREFIX + name, text, (*labels, *names)) for name, (text, names) in COUNTERS.items()
        } | {
            name: Gauge(PREFIX + name, text, (*labels, *names), multiprocess_mode="mostrecent")
            for name, (text, names) in GAUGES.items()
        }  # fmt: skip
        self._step, self._began = progress.step, time.monotonic()
        self._series: dict[tuple[str, ...], Any] = {}
        self._carried: dict[tuple[str, ...], float] = {}
        self.flush()

    def start(self) -> None:
        """Flush from a thread of its own from now on."""
        threading.Thread(target=self._run, name="bcg-dsa-metrics", daemon=True).start()

    def flush(self) -> None:
        """Carry over what changed since the last call."""
        ledger = self._ledger
        self._count(ledger.replayed, "prefill_total", "replay", "")
        for reason, times in ledger.first_reasons().items():
            self._count(times, "prefill_total", "eager", reason)
        for size, count in ledger.buckets().items():
            self._count(count.replays, "bucket_total", str(size))
            self._count(count.real, "tokens_total", "real", str(size))
            self._count(count.padded, "tokens_total", "padded", str(size))
        if self._voters is None and self._progress.step:
            self._voters = self._ask_voters()
        if self._voters:
            for rank, reason, votes in ledger.noes_of(range(self._voters)):
                self._count(votes, "vote_no_total", str(rank), reason)
        self._count(ledger.capture_failed, "capture_failed_total")
        for size, captured in ledger.captured().items():
            self._set(captured.seconds, "capture_seconds", str(size))
            if captured.bytes is not None:
                self._set(captured.bytes, "capture_bytes", str(size))
        self._set(self._waiting(), "vote_waiting_seconds")

    def _waiting(self) -> float:
        step, now = self._progress.step, time.monotonic()
        if step != self._step or not step:
            self._step, self._began = step, now
        return now - self._began

    def _run(self) -> None:
        while True:
            try:
                self.flush()
            except Exception:  # a full disk, say, must not end a server that serves
                logger.exception("sglang-bcg-dsa: metrics of this rank cannot be written, and stand still from now on")
                return
            time.sleep(INTERVAL)

    def _count(self, total: float, *key: str) -> None:
        more = total - self._carried.get(key, 0)
        # Padding is a difference of two numbers that were read one after the other: it may lag, not go back.
        if more > 0 or key not in self._carried:
            self._child(key).inc(max(0, more))
            self._carried[key] = max(0, total)

    def _set(self, value: float, *key: str) -> None:
        if self._carried.get(key) != value:
            self._child(key).set(value)
            self._carried[key] = value

    def _child(self, key: tuple[str, ...]) -> Any:
        if key not in self._series:
            name, *values = key
            names = (COUNTERS | GAUGES)[name][1]
            self._series[key] = self._metrics[name].labels(**self._labels, **dict(zip(names, values, strict=True)))
        return self._series[key]
