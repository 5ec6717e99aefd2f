"""Counters, the summary line, the warning, and what /server_info shows."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from sglang_bcg_dsa import reasons
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.hooks.explain import STATE_KEY, ExplainFeature
from sglang_bcg_dsa.hooks.manager import add, build_manager
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Captured, Forward
from sglang_bcg_dsa.seams import examine
from sglang_bcg_dsa.vote import Vote, tally


def replay(tokens: int = 20, bucket: int = 32) -> Forward:
    return Forward(True, 0, tokens, bucket, bucket, None, 5.0)


def eager(mask: int = reasons.PADDING) -> Forward:
    return Forward(False, mask, 7, 7, None, None, 5.0)


def test_counts_add_up() -> None:
    """Every prefill is counted once, every reason of it, and padding apart from real tokens."""
    ledger = Ledger(ReasonTable())
    for forward in (replay(20, 32), replay(16, 16), eager(reasons.PADDING | reasons.PREFIX), eager(reasons.PREFIX)):
        ledger.count_forward(forward)
    ledger.count_captured(Captured(16, 0.5, 1024))
    state = ledger.snapshot()
    assert state["prefill"] == {"replay": 2, "eager": 2}
    assert state["coverage"] == 0.5
    assert state["reasons"] == {"prefix": 2, "padding": 1}
    assert state["tokens"] == {"real": 36, "padded": 12}
    assert state["buckets"] == {"16": 1, "32": 1}
    assert state["capture"] == {"16": {"seconds": 0.5, "bytes": 1024}}
    assert state["adapter_us"] == {"median": 5.0, "max": 5.0}


def test_nothing_counted_is_not_zero_coverage() -> None:
    """A server that had no prefill yet has no coverage, rather than a bad one."""
    assert Ledger(ReasonTable()).snapshot()["coverage"] is None


def test_noes_are_counted_by_rank_and_reason() -> None:
    """Which rank said no, and why; yes votes are not listed."""
    ledger = Ledger(ReasonTable())
    votes = [Vote(0, 5, True, True, 0), Vote(1, 5, True, False, reasons.PREFIX | reasons.PADDING)]
    for _ in range(3):
        ledger.count_verdict(tally(1, votes, RunnerFacts((16,))))
    assert ledger.snapshot()["votes_no"] == [
        {"rank": 1, "reason": "padding", "votes": 3},
        {"rank": 1, "reason": "prefix", "votes": 3},
    ]


def feature(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> tuple[ExplainFeature, list[float]]:
    """An installed feature, and the clock it reads."""
    manager = build_manager()
    made = ExplainFeature(manager.hook, Progress(), lambda: {"features": {"vote": "supplied"}})
    add(manager, "explain", made)
    config = msgspec.structs.replace(Config(), explain=msgspec.structs.replace(Config().explain, **settings))
    installer = SimpleNamespace(around=lambda *a: None, after=lambda *a: None)
    made.bcg_install(config=config, seams=examine(), reasons=ReasonTable(), installer=installer)  # type: ignore[arg-type]
    made._get_parallel = lambda: SimpleNamespace(attn_dp_rank=1, tp_rank=3)
    clock = [1000.0]
    monkeypatch.setattr("sglang_bcg_dsa.hooks.explain.time.monotonic", lambda: clock[0])
    return made, clock


def test_one_summary_line_an_interval(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """While there are prefills, not before, and with the interval's own numbers."""
    made, clock = feature(monkeypatch, summary_seconds=60.0)
    with caplog.at_level(logging.INFO):
        for forward in (replay(), replay(), eager()):
            made.bcg_forward(forward)
        assert "prefills in the last" not in caplog.text
        clock[0] += 61
        made.bcg_forward(replay())
    lines = [r.getMessage() for r in caplog.records if "prefills in the last" in r.getMessage()]
    assert lines == [
        "sglang-bcg-dsa: 3 prefills in the last 60 s, 2 replayed (66.7 %); since start 75.0 %; reasons: padding 1"
    ]


def test_zero_coverage_is_warned_about_once_with_the_reasons(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """S#29962, S#37192: nobody noticed for weeks. Here the log says so after the first prefills, and why."""
    made, _ = feature(monkeypatch, zero_coverage_after=5)
    for _ in range(20):
        made.bcg_forward(eager(reasons.PREFIX))
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "none of the first 5 prefills replayed" in warnings[0]
    assert "prefix (5: a cached prefix needs" in warnings[0]


def test_a_single_replay_keeps_it_quiet(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Low coverage is not zero coverage."""
    made, _ = feature(monkeypatch, zero_coverage_after=5)
    made.bcg_forward(replay())
    for _ in range(20):
        made.bcg_forward(eager())
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


def test_server_info_gets_builtin_types(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang encodes the state with msgpack: everything of ours survives that, with rank and features."""
    made, _ = feature(monkeypatch)
    made.bcg_forward(replay())
    made.bcg_captured(Captured(32, 0.25, None))
    result = made.on_state(SimpleNamespace(internal_state={"theirs": 1}))
    state = msgspec.msgpack.decode(msgspec.msgpack.encode(result.internal_state))
    assert state["theirs"] == 1
    assert state[STATE_KEY]["rank"] == {"dp": 1, "tp": 3}
    assert state[STATE_KEY]["features"] == {"vote": "supplied"}
    assert state[STATE_KEY]["coverage"] == 1.0


def test_eager_prefills_without_a_graph_runner_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody asks the forward-time check, the eager runner tells; decodes and drafts are not prefills."""
    made, _ = feature(monkeypatch)
    seen: list[Forward] = []
    made._hooks = SimpleNamespace(bcg_forward=lambda forward: seen.append(forward))
    for is_extend, draft, has_graphs, counted in (
        (True, False, False, 1), (False, False, False, 1), (True, True, False, 1), (True, False, True, 1),
    ):  # fmt: skip
        prefill_runner = SimpleNamespace(capture_num_tokens=[16]) if has_graphs else None
        model = SimpleNamespace(is_draft_worker=draft, prefill_cuda_graph_runner=prefill_runner)
        batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda e=is_extend: e), input_ids=[0] * 9)
        assert made.on_eager(lambda r, fb: "ran", SimpleNamespace(model_runner=model), batch) == "ran"
        assert len(seen) == counted
    assert seen[0].against == reasons.NO_GRAPH_RUNNER


def test_counting_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters on the hot path: under 5 us a forward (best of five)."""
    import timeit

    made, _ = feature(monkeypatch)
    forward = replay()
    best = min(timeit.repeat(lambda: made.bcg_forward(forward), number=2000, repeat=5)) / 2000
    assert best < 5e-6
