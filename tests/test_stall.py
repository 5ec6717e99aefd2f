"""Where a rank is, and what becomes of one that stalls: reports of all ranks, a name, an end within seconds.

Ranks are threads, the store is torch's own, the replay is the host's engine on the tape. That the
server as a whole goes down is shown by the rehearsals and by the chaos rounds.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    eager_on_graph,
)

from sglang_bcg_dsa import reasons, rollcall, stopping, vote
from sglang_bcg_dsa.breaks import Break
from sglang_bcg_dsa.engine import current_capture
from sglang_bcg_dsa.hooks import audit as audit_module
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import BETWEEN, CAPTURE, FORWARD, RECEIVE, RESULTS, VOTE, Progress
from sglang_bcg_dsa.rollcall import RollCall, suspects
from sglang_bcg_dsa.testing import TapeGraph
from tests.test_startup import audit


@contextmanager
def elsewhere(function: Callable[[], Any]) -> Iterator[threading.Thread]:
    """Run ``function`` in a thread, which must have got as far as its block by then."""
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    time.sleep(0.1)
    yield thread


# ---------------------------------------------------------------------- where


@pytest.mark.parametrize("native", [False, True], ids=["our break", "the host's break"])
def test_a_report_names_segment_and_break_of_a_replay(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    """Read off the host's own replay loop on this release, from outside, while a break or a segment does not end."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
    for module in (torch.cuda, torch.cpu):
        monkeypatch.setattr(module, "current_stream", lambda device=None: None)
    go, stuck = threading.Event(), threading.Event()

    def experts(*tensors: torch.Tensor) -> None:
        if stuck.is_set():
            go.wait(10)

    brk: Any = eager_on_graph(True)(experts) if native else Break(experts, current_capture=current_capture)
    x, graph = torch.ones(2), BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph):
        hidden = x * 2
        for _ in range(2):
            out = torch.empty_like(hidden)
            # The host's break holds tensors weakly, which torch can do on a GPU only.
            brk(*([] if native else [out, hidden]))
            hidden = out * 3
    feature = audit()
    progress = feature._progress
    progress.step = 12
    progress.verdict = vote.tally(12, [vote.Vote(0, 50, True, True, 0)], RunnerFacts((64,)))

    def replay() -> None:
        batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
        feature.on_run(lambda scheduler, batch: graph.replay(), None, batch)

    stuck.set()
    with elsewhere(replay) as thread:
        text = progress.describe()
        go.set()
        thread.join(10)
    wanted = "segment 1 of 3 replayed, in break 1 of 2 (experts)"
    for part in ("runs a forward (extend) since 0.", "step 12", "verdict replay, bucket 64", wanted, "at Condition.wait"):
        assert part in text
    stuck.clear()
    go.clear()
    segment = graph._segments[2]
    graph._segments[2] = SimpleNamespace(replay=lambda: go.wait(10))
    graph._segments[2].replay.__code__ = graph._segments[2].replay.__code__.replace(co_name="replay")
    with elsewhere(replay) as thread:
        text = progress.describe()
        go.set()
        thread.join(10)
    graph._segments[2] = segment
    assert "segment 3 of 3, last collective: the vote of step 12" in text
    assert progress.at[0] == BETWEEN


def test_a_report_says_why_the_group_runs_eagerly_and_names_the_collective() -> None:
    """The verdict's noes with their reasons; the collective from the stack of the thread that is in it."""
    progress = Progress()
    votes = [vote.Vote(0, 50, True, True, 0), vote.Vote(1, 7, True, False, reasons.PREFIX)]
    progress.step, progress.verdict = 3, vote.tally(3, votes, RunnerFacts((64,)))
    store, go = dist.HashStore(), threading.Event()

    def barrier() -> None:
        before = progress.enter(FORWARD, ForwardMode.EXTEND)
        torch.distributed.distributed_c10d.GroupMember.stuck(go)  # type: ignore[attr-defined]
        progress.leave(before)

    exec(
        "def stuck(go): go.wait(10)",
        vars(torch.distributed.distributed_c10d),
    )
    del store
    torch.distributed.distributed_c10d.GroupMember.stuck = staticmethod(torch.distributed.distributed_c10d.stuck)  # type: ignore[attr-defined]
    try:
        with elsewhere(barrier) as thread:
            assert progress.waits
            text = progress.describe()
            go.set()
            thread.join(10)
    finally:
        del torch.distributed.distributed_c10d.stuck, torch.distributed.distributed_c10d.GroupMember.stuck
    assert "verdict eager (DP rank 1: prefix)" in text
    assert "in collective stuck" in text
    assert not progress.waits


def test_a_report_survives_an_engine_it_does_not_know() -> None:
    """A release whose replay loop looks different costs the place in the replay, not the report."""
    progress = Progress()
    progress.replay = lambda frame, below: str(frame.f_locals["no such local"])
    assert "place in the replay unknown (KeyError" in progress.describe()


def test_a_mark_is_seen_whole() -> None:
    """A reader never pairs one phase with another's time: an idle hour is no hour's wait for a vote."""
    progress = Progress()
    progress.at = (progress.at[0], time.monotonic() - 3600, None)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            progress.leave(progress.enter(VOTE))
            progress.at = (progress.at[0], time.monotonic() - 3600, None)

    with elsewhere(work) as thread:
        end = time.monotonic() + 0.3
        while time.monotonic() < end:
            phase, since, _ = progress.at
            assert phase == BETWEEN or time.monotonic() - since < 60
        stop.set()
        thread.join(5)


def test_marks_nest() -> None:
    """A vote inside a forward leaves the rank in its forward."""
    progress = Progress()
    forward = progress.enter(FORWARD)
    progress.leave(progress.enter(VOTE))
    assert progress.at[0] == FORWARD
    progress.leave(forward)
    assert progress.at[0] == BETWEEN


def test_marks_cost_little() -> None:
    """Receipt, vote, forward and results of one step: under 6 us in all, wraps included (best of 200)."""
    import timeit

    feature = audit()
    batch = SimpleNamespace(forward_mode=ForwardMode.EXTEND)

    def step() -> None:
        feature.on_receive(_nothing, None, None)
        feature._progress.leave(feature._progress.enter(VOTE))
        feature.on_run(_nothing, None, batch)
        feature.on_results(_nothing, None, batch, None)

    best = min(timeit.repeat(step, number=100, repeat=200)) / 100
    print(f"marks of one step: {best * 1e6:.2f} us")
    assert best < 6e-6


def _nothing(scheduler: Any, batch: Any, *args: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("found", "late"),
    [
        ({0: (9, True), 1: None, 2: (8, True)}, "Rank 1 keeps"),  # silent before all else
        ({0: (9, True), 1: (8, True), 2: (9, True)}, "Rank 1 keeps"),  # behind
        ({0: (9, True), 1: (9, True), 2: (9, False)}, "Rank 2 keeps"),  # the only one that does not wait
        ({0: (9, True), 1: None, 2: None}, "Rank 1, 2 keeps"),
        ({0: (9, True), 1: (9, True), 2: (8, False), 3: (8, True)}, "Rank 2 keeps"),  # 3 waits for 2, of its attention TP
        ({0: (9, True), 1: (8, True), 2: (8, True)}, "Rank 1, 2 keeps"),
        ({0: (9, True), 1: (9, True)}, "No rank is behind"),
        ({0: (9, False), 1: (9, False)}, "No rank is behind"),
    ],
)
def test_who_keeps_the_others_waiting(found: dict[int, tuple[int, bool] | None], late: str) -> None:
    """One sentence with the rank an operator looks at first; no guess where ranks are level."""
    records = {r: {"where": ""} if at is None else {"where": "", "step": at[0], "waits": at[1]} for r, at in found.items()}
    assert suspects(records).startswith(late)


# ---------------------------------------------------------------------- stalls


class Down(BaseException):
    """Stands for the end of a process."""


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Ranks are threads over one store; ``downed`` lists those that brought their server down."""
    here, store = threading.local(), dist.HashStore()
    state = SimpleNamespace(here=here, store=store, size=2, downed=[], threads=[], over=False)
    for module in (audit_module, rollcall):
        monkeypatch.setattr(module, "group", lambda: (state.store, here.rank, state.size))

    def down() -> None:
        state.downed.append(here.rank)
        raise Down

    monkeypatch.setattr(audit_module, "bring_down", down)
    monkeypatch.setattr(audit_module, "bring_down_within", lambda seconds: None)

    def tick(seconds: float) -> None:
        if state.over:
            raise Down

    monkeypatch.setattr(audit_module, "_arm_faulthandler", tick)
    monkeypatch.setattr(rollcall, "ANSWER_SECONDS", 0.6)
    yield state
    state.over = True
    for thread in state.threads:
        thread.join(10)


def watch(world: Any, ranks: dict[int, Progress], limit: float, seconds: float) -> list[int]:
    """Run the ranks' watchdogs for at most ``seconds``; those that brought their server down, in order."""

    def one(rank: int) -> None:
        world.here.rank = rank
        feature = audit(ranks[rank], f"[audit]\nstall_seconds = {limit}")
        listener = threading.Thread(target=lambda: listen(feature, rank), daemon=True)
        listener.start()
        with contextlib.suppress(Down):
            feature._watch()

    def listen(feature: Any, rank: int) -> None:
        world.here.rank = rank
        while not world.over and not feature._rolls.asked():
            time.sleep(0.05)
        feature._asked.set()

    threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in ranks]
    world.threads += threads
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    while len(world.downed) < len(ranks) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sorted(world.downed)


def at(phase: str, step: int) -> Progress:
    progress = Progress()
    progress.step = step
    if phase != BETWEEN:
        progress.enter(phase)
    return progress


@pytest.mark.parametrize(
    ("phases", "words"),
    [
        ((VOTE, BETWEEN), ["no verdict for 0.3 s", "rank 0 waits since", "rank 1 has not voted since", "Rank 1 keeps"]),
        ((VOTE, FORWARD), ["no verdict", "a forward does not end", "rank 1 runs a forward", "Rank 1 keeps"]),
        ((RECEIVE, BETWEEN), ["requests are not passed on for 0.3 s", "rank 0 receives requests since", "Rank 1 keeps"]),
        ((RESULTS, FORWARD), ["no results of a forward", "a forward does not end"]),
    ],
)
def test_every_rank_writes_one_report_and_the_late_one_is_named(
    world: Any, caplog: pytest.LogCaptureFixture, phases: tuple[str, str], words: list[str]
) -> None:
    """Votes, forwards, waits for results: all ranks report once, with stacks, and all their servers go down."""
    ranks = {rank: at(phase, 5 - rank) for rank, phase in enumerate(phases)}
    start = time.monotonic()
    with caplog.at_level(logging.CRITICAL):
        assert watch(world, ranks, 0.3, 10) == [0, 1]
    assert time.monotonic() - start < 5
    for rank in ranks:
        assert caplog.text.count(f"report of rank {rank}: it") == 1
    assert caplog.text.count("Stacks:\nthread") == 2
    for word in words:
        assert word in caplog.text


def test_a_rank_that_cannot_answer_is_named_too(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A stopped process has no watchdog: it is the one that does not answer."""
    with caplog.at_level(logging.CRITICAL):
        assert watch(world, {0: at(VOTE, 5)}, 0.3, 10) == [0]
    assert "rank 1 does not answer: it is stopped, dead or holds the interpreter" in caplog.text
    assert "Rank 1 keeps the others waiting" in caplog.text


@pytest.mark.parametrize("phase", [BETWEEN, CAPTURE])
def test_an_idle_server_and_a_capture_are_left_alone(world: Any, phase: str) -> None:
    """Nobody votes because nothing is asked, or kernels are compiled while capturing: no report, however long."""
    ranks = {0: at(phase, 5), 1: at(phase, 5)}
    for progress in ranks.values():
        progress.at = (progress.at[0], time.monotonic() - 3600, None)
    assert watch(world, ranks, 0.1, 1.0) == []


def test_a_slow_forward_below_the_limit_is_left_alone(world: Any) -> None:
    """A first forward that compiles for a minute: the limit counts one forward, not the time since the last vote."""
    progress = at(BETWEEN, 5)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            before = progress.enter(FORWARD)
            time.sleep(0.35)
            progress.leave(before)

    with elsewhere(work) as thread:
        assert watch(world, {0: progress}, 0.7, 2.0) == []
        stop.set()
        thread.join(5)


def test_an_idle_rank_that_receives_nothing_again_and_again_is_left_alone(world: Any) -> None:
    """It is in the broadcast of requests nearly all the time: the limit counts one of them."""
    progress = Progress()
    feature, stop = audit(progress), threading.Event()
    feature._receipt = RECEIVE

    def idle() -> None:
        while not stop.is_set():
            feature.on_receive(time.sleep, 0.1)

    with elsewhere(idle) as thread:
        assert progress.at[0] == RECEIVE
        assert watch(world, {0: progress}, 0.4, 2.0) == []
        stop.set()
        thread.join(5)


@pytest.mark.parametrize(("stages", "phase"), [(1, RECEIVE), (4, BETWEEN)])
def test_the_receipt_of_pipeline_stages_is_not_limited(
    world: Any, monkeypatch: pytest.MonkeyPatch, stages: int, phase: str
) -> None:
    """The second stage waits there for the first, which waits for the last: four first forwards that compile, one by one."""
    world.here.rank, world.size = 0, 1
    monkeypatch.setattr(audit_module.threading, "Thread", lambda **kwargs: SimpleNamespace(start=lambda: None))
    feature = audit()
    feature._get_parallel = lambda: SimpleNamespace(pp_size=stages, attn_dp_rank=0)
    feature.on_ready(None, None)
    assert feature.on_receive(lambda receiver, local_reqs: feature._progress.at[0], None, local_reqs=[]) == phase


def test_a_process_that_was_stopped_and_goes_on_is_left_alone(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A frozen container, or SIGSTOP and SIGCONT: its clock went on without it, which is no stall of anybody."""
    progress = at(VOTE, 5)
    real, jumped = time.monotonic, threading.Event()
    monkeypatch.setattr(time, "monotonic", lambda: real() + (1000 if jumped.is_set() else 0))
    with elsewhere(lambda: watch(world, {0: progress}, 1.5, 1010)):
        jumped.set()
        time.sleep(1.0)
        progress.leave(Progress().at)
        time.sleep(1.0)
    assert world.downed == []


def test_rank_0_stopped_holds_the_store_and_is_named(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Every operation on the store then waits for minutes: the watchdog does not, and knows who it is (found by chaos)."""
    gone = threading.Event()

    class Stopped:
        def __getattr__(self, name: str) -> Any:
            return lambda *args: gone.wait(60)

    world.store = Stopped()
    world.here.rank = 1
    feature = audit(at(VOTE, 5), "[audit]\nstall_seconds = 0.3")
    listener = threading.Thread(target=lambda: (setattr(world.here, "rank", 1), feature._listen()), daemon=True)
    listener.start()
    start = time.monotonic()
    with caplog.at_level(logging.CRITICAL), pytest.raises(Down):
        feature._watch()
    assert time.monotonic() - start < 5
    assert "rank 0 does not answer: it is stopped, dead or holds the interpreter (it holds the store" in caplog.text
    assert "Rank 0 keeps the others waiting" in caplog.text
    world.over = True
    gone.set()
    listener.join(5)


def test_a_rank_that_found_out_itself_does_not_report_twice(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A broken vote is reported by the scheduler's thread, with its own roll call."""
    progress = at(VOTE, 5)
    feature = audit(progress, "[audit]\nstall_seconds = 0.2")
    feature._rolls.spoken = True
    world.here.rank = 0
    with caplog.at_level(logging.CRITICAL):
        feature._watch()
    assert (world.downed, caplog.text) == ([], "")


def test_a_collective_that_a_peer_broke_is_followed_by_a_roll_call(world: Any, caplog: pytest.LogCaptureFixture) -> None:
    """gloo says "connection closed", not by whom; an error of other origin is not made more of than it is."""
    world.here.rank = 0
    feature = audit()
    feature._progress.collectives = ("_Group.",)

    class _Group:
        @staticmethod
        def all_reduce(*args: Any) -> None:
            raise RuntimeError("Connection closed by peer")

    _Group.all_reduce.__code__ = _Group.all_reduce.__code__.replace(co_qualname="_Group.all_reduce")
    with pytest.raises(RuntimeError, match="closed by peer"):
        feature.on_run(_Group.all_reduce, None, SimpleNamespace(forward_mode=ForwardMode.EXTEND))
    assert "collective _Group.all_reduce failed (Connection closed by peer)" in caplog.text
    assert "rank 1 does not answer" in caplog.text
    caplog.clear()
    with pytest.raises(RuntimeError):
        feature.on_run(_out_of_memory, None, SimpleNamespace(forward_mode=ForwardMode.EXTEND))
    assert caplog.text == ""


def _out_of_memory(*args: Any) -> None:
    raise RuntimeError("out of memory")


def test_a_roll_call_without_a_group_still_answers() -> None:
    """It is used when something is wrong already; it must not raise on top."""
    assert "no process group" in RollCall(Progress()).call()


def test_a_thread_that_keeps_the_interpreter_is_still_written_down() -> None:
    """No Python thread runs then, the watchdog's neither: faulthandler's timer writes the stacks."""
    code = (
        "import ctypes, time\n"
        "from sglang_bcg_dsa.hooks.audit import _arm_faulthandler\n"
        "_arm_faulthandler(0.3)\n"
        "def holds_the_interpreter():\n"
        "    ctypes.PyDLL(None).usleep(900000)\n"
        "holds_the_interpreter()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0
    assert "Timeout" in done.stderr
    assert "holds_the_interpreter" in done.stderr


def test_the_server_goes_down_even_if_the_report_gets_stuck() -> None:
    """A log nobody reads, or a lock the stuck thread holds, must not keep a stalled server up."""
    code = (
        "import os, time\n"
        "from sglang_bcg_dsa import stopping\n"
        "stopping._tell_parent = lambda: print('told', flush=True)\n"
        "stopping.bring_down_within(0.3)\n"
        "time.sleep(60)\n"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (1, "told\n")
    assert time.monotonic() - start < 20
    assert stopping.bring_down_within.__doc__
