"""The ledger under ``/metrics``: what is exported, by whom, in which processes, at which cost."""

from __future__ import annotations

import logging
import timeit
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest

from sglang_bcg_dsa import metrics, reasons
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.metrics import Exporter
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Captured, Forward
from sglang_bcg_dsa.report import from_metrics
from sglang_bcg_dsa.vote import Verdict, Vote, tally
from tests.conftest import ROOT, Run
from tests.test_explain import eager, feature, replay

LABELS = {"model_name": "m", "engine_type": "unified", "tp_rank": 3, "dp_rank": 0}


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """prometheus_client has one registry a process; what a test registers goes with it."""
    before = set(REGISTRY._collector_to_names)
    yield
    for collector in set(REGISTRY._collector_to_names) - before:
        REGISTRY.unregister(collector)


def value(name: str, **labels: object) -> float | None:
    return REGISTRY.get_sample_value(metrics.PREFIX + name, {k: str(v) for k, v in {**LABELS, **labels}.items()})


def voted() -> Progress:
    """A rank that took part in a vote."""
    progress = Progress()
    progress.step = 1
    return progress


def split(mask: int, ranks: int = 2) -> Verdict:
    """The last rank refuses."""
    return tally(1, [Vote(r, 5, True, r < ranks - 1, 0 if r < ranks - 1 else mask) for r in range(ranks)], RunnerFacts((16,)))


def test_each_forward_counts_once_and_votes_count_by_rank() -> None:
    """Sums mean something: two reasons are one eager forward, but two reasons of a vote."""
    ledger = Ledger(ReasonTable())
    exporter = Exporter(ledger, voted(), LABELS, lambda: 2)
    assert value("prefill_total", path="eager", reason="prefix") == 0, "there from the start: increase() sees the first"
    assert value("vote_no_total", rank=1, reason="padding") == 0
    both = reasons.PREFIX | reasons.PADDING
    for forward in (replay(20, 32), replay(30, 32), eager(both), eager(0)):
        ledger.count_forward(forward)
    ledger.count_verdict(split(both))
    ledger.count_captured(Captured(32, 0.5, 2048))
    ledger.count_captured(Captured(64, 0.25, None))
    for _ in range(3):
        exporter.flush()
    assert value("prefill_total", path="replay", reason="") == 2
    assert value("prefill_total", path="eager", reason="prefix") == 1
    assert value("prefill_total", path="eager", reason="padding") == 0
    assert value("prefill_total", path="eager", reason="unknown") == 1
    assert (value("tokens_total", kind="real", bucket=32), value("tokens_total", kind="padded", bucket=32)) == (50, 14)
    assert (value("bucket_total", bucket=32), value("bucket_total", bucket=64)) == (2, 0)
    assert [value("vote_no_total", rank=1, reason=r) for r in ("prefix", "padding", "lora")] == [1, 1, 0]
    assert [value("capture_seconds", bucket=b) for b in (32, 64)] == [0.5, 0.25]
    assert [value("capture_bytes", bucket=b) for b in (32, 64)] == [2048, None]
    assert value("capture_failed_total") == 0


def test_what_is_exported_is_what_server_info_shows() -> None:
    """``report`` reads the same from both, third-party reasons included; no mask becomes a label."""
    table = ReasonTable([("theirs", "unlucky")])
    ledger = Ledger(table)
    exporter = Exporter(ledger, voted(), LABELS, lambda: 2)
    for i in range(200):
        mask = 1 << i % len(table.names)
        ledger.count_forward(replay(1 + i % 16, 16 << i % 3) if i % 3 else eager(mask))
        ledger.count_verdict(split(mask))
    exporter.flush()
    text = generate_latest(REGISTRY).decode()
    (state,), shown = from_metrics("text", text), ledger.snapshot()
    for key in ("prefill", "coverage", "reasons", "votes_no", "tokens", "buckets", "bucket_tokens", "capture"):
        assert state[key] == shown[key], key
    used = {s.labels["reason"] for f in REGISTRY.collect() for s in f.samples if "bcg_dsa" in s.name and "reason" in s.labels}
    assert used == {*table.names, "unknown", ""}
    assert state["rank"] == {"dp": 0, "tp": 3}


def test_a_rank_that_waits_for_a_vote_is_seen_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's thread is stuck then; the gauge grows all the same, and goes back to 0 with the next vote."""
    clock = [1000.0]
    monkeypatch.setattr("sglang_bcg_dsa.metrics.time.monotonic", lambda: clock[0])
    progress = Progress()
    exporter = Exporter(Ledger(ReasonTable()), progress, LABELS, int)

    def shown(step: int, later: float) -> float | None:
        progress.step, clock[0] = step, clock[0] + later
        exporter.flush()
        return value("vote_waiting_seconds")

    assert shown(0, 100) == 0, "ranks that never vote do not wait"
    assert [shown(7, 1), shown(7, 42), shown(7, 1), shown(8, 1), shown(9, 1)] == [0, 42, 43, 0, 0]


def test_labels_that_clash_with_a_user_s_own_stop_the_start() -> None:
    """--extra-metric-labels may bring any name; two meanings of one label are refused, by name."""
    with pytest.raises(StartupError, match=r"--extra-metric-labels names bucket, reason"):
        Exporter(Ledger(ReasonTable()), Progress(), {**LABELS, "reason": "x", "bucket": "y"}, int)


def join(made: Any, dp: int, enabled: bool = True) -> None:
    made._get_parallel = lambda: SimpleNamespace(attn_dp_rank=dp, attn_dp_size=2, tp_rank=dp)
    made._progress.step = 1
    collector = SimpleNamespace(labels={**LABELS, "dp_rank": dp})
    assert made.on_metrics(SimpleNamespace(current_scheduler_metrics_enabled=enabled, collector=collector)) is None


def test_who_publishes_follows_the_host_and_votes_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang does not publish, neither do we; all ranks' votes come from TP rank 0 alone."""
    monkeypatch.setattr(Exporter, "start", Exporter.flush)
    made, _ = feature(monkeypatch)
    join(made, 0, enabled=False)
    assert value("prefill_total", path="replay", reason="") is None
    join(made, 1)
    assert value("prefill_total", path="replay", reason="", dp_rank=1) == 0
    votes = [s for f in REGISTRY.collect() for s in f.samples if s.name == "sglang:bcg_dsa_vote_no_total"]
    assert votes == []


@pytest.mark.parametrize(("dp", "tp", "voters"), [(0, 0, 2), (0, 1, 0), (1, 2, 0)])
def test_ranks_that_share_dp_rank_0_do_not_count_its_votes_again(
    monkeypatch: pytest.MonkeyPatch, dp: int, tp: int, voters: int
) -> None:
    """With --enable-metrics-for-all-schedulers every one of them publishes, and has gathered all votes."""
    made, _ = feature(monkeypatch)
    made._get_parallel = lambda: SimpleNamespace(attn_dp_rank=dp, attn_dp_size=2, tp_rank=tp)
    assert made._voters() == voters


def test_sglang_is_not_asked_for_its_groups_before_it_has_them() -> None:
    """0.5.16 makes its metrics before its DP groups; once a rank has voted they exist."""
    progress = Progress()
    exporter = Exporter(Ledger(ReasonTable()), progress, LABELS, lambda: 2 if progress.step else 1 // 0)
    exporter.flush()
    assert value("vote_no_total", rank=1, reason="padding") is None
    progress.step = 1
    exporter.flush()
    assert value("vote_no_total", rank=1, reason="padding") == 0


def test_a_failed_capture_is_counted_and_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The exception goes on; the log has the bucket."""
    made, _ = feature(monkeypatch)

    def out_of_memory(runner: Any, size: int) -> None:
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        made.on_capture_one(out_of_memory, SimpleNamespace(device="cpu"), 64)
    assert made.ledger.capture_failed == 1
    assert "capture of bucket 64 failed: out of memory" in caplog.text


def test_metrics_that_cannot_be_written_are_reported_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server goes on; the log says that the numbers stand still, and why."""
    exporter = Exporter(Ledger(ReasonTable()), Progress(), LABELS, int)

    def full() -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(exporter, "flush", full)
    with caplog.at_level(logging.ERROR):
        exporter._run()
    assert [r.getMessage() for r in caplog.records] == [
        "sglang-bcg-dsa: metrics of this rank cannot be written, and stand still from now on"
    ]
    assert "no space left" in caplog.text


def test_counting_costs_under_five_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """All counters of one forward, its verdict included, 8 ranks, exporter running; replayed, and refused by one.

    The best of many short turns: neighbours on the same cores can make Python three times slower.
    """
    made, _ = feature(monkeypatch)
    join(made, 0)
    yes = tally(1, [Vote(r, 5, True, True, 0) for r in range(8)], RunnerFacts((16,)))
    no = split(reasons.PREFIX, 8)
    refused = eager(no.against)
    for verdict, forward in ((yes, replay()), (no, refused)):

        def count(verdict: Verdict = verdict, forward: Forward = forward) -> None:
            made.bcg_verdict(verdict)
            made.bcg_forward(forward)

        assert min(timeit.repeat(count, number=100, repeat=300)) / 100 < 5e-6


RANK = """
import sys, time
from sglang_bcg_dsa.metrics import Exporter, INTERVAL
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Captured, Forward
assert "prometheus_client" not in sys.modules
rank = int(sys.argv[1])
ledger = Ledger(ReasonTable())
ledger.count_captured(Captured(16, 0.5 + rank, None))
Exporter(ledger, Progress(), {"model_name": "m", "dp_rank": rank, "tp_rank": rank}, int).start()
for _ in range(10 + rank):
    ledger.count_forward(Forward(True, 0, 9, 16, 16, None, 1.0))
time.sleep(2 * INTERVAL)
"""


def test_processes_share_one_endpoint(fresh: Run, tmp_path: Path) -> None:
    """Prometheus' multi-process mode: two ranks write, a third process reads all, the last forwards included."""
    env = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "shared")}
    (tmp_path / "shared").mkdir()
    (tmp_path / "rank.py").write_text(RANK)
    for rank in "01":
        done = fresh([str(tmp_path / "rank.py"), rank], env=env, path=[ROOT])
        assert done.returncode == 0, done.stderr
    done = fresh(
        "from prometheus_client import CollectorRegistry, generate_latest, multiprocess as m\n"
        "registry = CollectorRegistry(); m.MultiProcessCollector(registry); print(generate_latest(registry).decode())",
        env=env,
    )
    states = from_metrics("text", done.stdout)
    assert [s["prefill"]["replay"] for s in states] == [10, 11]
    assert [s["bucket_tokens"] for s in states] == [{"16": {"real": 9 * n, "padded": 7 * n}} for n in (10, 11)]
    assert [s["capture"] for s in states] == [{"16": {"seconds": 0.5 + r, "bytes": None}} for r in (0, 1)]


def test_prometheus_client_is_imported_late(fresh: Run) -> None:
    """Imported before SGLang names the shared folder, it would keep this process's numbers to itself."""
    code = "import sys, sglang_bcg_dsa.activate, sglang_bcg_dsa.cli; print('prometheus_client' in sys.modules)"
    done = fresh(code, path=[ROOT])
    assert done.stdout.strip() == "False", done.stderr
