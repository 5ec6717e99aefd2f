"""Builtin feature ``audit``: ranks compare what they run, and a rank that stalls is named.

Contract: before the first capture every rank has seen every other's versions, feature states, reasons
and ladder, before the first vote what its graphs serve, and a difference has stopped the start. A
rank whose receipt of requests (a broadcast), vote, forward or wait for results lasts longer than
``audit.stall_seconds`` asks all where they are; each that can answers, and writes one report: its
place and the Python stacks of all its threads. Then the server goes down, within seconds, on every
node. A thread on every rank does this, over the key-value store and not over a collective. Left alone
are a rank of which nothing is asked, a capture, which compiles kernels and has its own limit, and a
pipeline stage's receipt, which lasts as long as all stages' forwards together.

A process that was stopped itself (SIGSTOP, a frozen container) and goes on counts its waits anew. One
that keeps the interpreter to itself cannot run the thread: others name it, and faulthandler's timer,
which needs no interpreter, writes its stacks.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from types import FrameType
from typing import Any

from sglang_bcg_dsa import __version__, rollcall
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.exchange import Missing, Record, differences, publish_and_collect
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import BETWEEN, CAPTURE, FORWARD, LIMITED, RECEIVE, RESULTS, VOTE, Progress, stacks
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.rollcall import RollCall, group
from sglang_bcg_dsa.seams import SeamSet, resolve
from sglang_bcg_dsa.stopping import bring_down, bring_down_within, refuse

logger = logging.getLogger(__name__)

_START = "sglang_bcg_dsa/start"
_READY = "sglang_bcg_dsa/ready"
_STALLED = {
    RECEIVE: "requests are not passed on",
    VOTE: "no verdict",
    FORWARD: "a forward does not end",
    RESULTS: "no results of a forward",
}


class AuditFeature:
    """The exchange at start and the watchdog."""

    name = "audit"

    def __init__(
        self,
        progress: Progress,
        rolls: RollCall,
        features: Callable[[], dict[str, Any]],
        captured: Callable[[], RunnerFacts | None],
    ) -> None:
        self._progress = progress
        self._rolls = rolls
        self._features = features
        self._captured = captured
        self._exchanged = False
        self._receipt = BETWEEN
        """The phase in which requests are received."""
        self._asked = threading.Event()

    # ------------------------------------------------------------------ plugin hooks

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        return Feature(self.name, State.SUPPLIED, "SGLang does not compare its ranks and does not name a stalled one")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._settings = config.audit
        self._table = reasons
        self._get_parallel = resolve(seams["parallel"])
        self._loop = seams["audit.replay"].name
        self._progress.table = reasons
        self._progress.collectives = (f"{seams['audit.collectives'].name}.",)
        self._progress.replay = self._place
        installer.around("runner.capture", self.on_capture)
        installer.after("scheduler.ready", self.on_ready)
        installer.around("scheduler.receive", self.on_receive)
        installer.around("scheduler.run", self.on_run)
        installer.around("scheduler.results", self.on_results)

    # ------------------------------------------------------------------ start-up

    def on_capture(self, original: Callable[..., Any], runner: Any) -> Any:
        """Compare with the other ranks before the first capture: captures hold collectives."""
        if not runner.model_runner.is_draft_worker:
            self._compare_start(tuple(sorted(runner.capture_num_tokens)))
        before = self._progress.enter(CAPTURE)
        try:
            return original(runner)
        finally:
            self._progress.leave(before)

    def on_ready(self, result: Any, scheduler: Any) -> None:
        """The scheduler is built. Ranks without graphs have not compared yet."""
        self._compare_start(())
        if int(self._get_parallel().pp_size) == 1:
            self._receipt = RECEIVE
        if group()[2] > 1:
            self._compare_ready()
        for target in (self._watch, self._listen):
            threading.Thread(target=target, name=f"bcg-dsa{target.__name__}", daemon=True).start()

    def _compare_start(self, ladder: tuple[int, ...]) -> None:
        if self._exchanged:
            return
        self._exchanged = True
        world = len(
            self._compare(
                _START,
                {
                    "plugin version": __version__,
                    "SGLang version": version("sglang"),
                    "torch version": version("torch"),
                    "reasons": list(self._table.names),
                    "ladder": list(ladder),
                    **self._features(),
                },
            )
        )
        if world > 1 and group()[1] == 0:
            logger.info("sglang-bcg-dsa: %d ranks agree on version, features, reasons and ladder", world)

    def _compare_ready(self) -> None:
        """What the graphs serve decides the verdict; pipeline stages have different layers and may differ."""
        parallel = self._get_parallel()
        facts = self._captured()
        shared = facts._asdict() if facts is not None and int(parallel.pp_size) == 1 else {}
        same = {"graphs captured": facts is not None, **{f"graphs, {name}": value for name, value in shared.items()}}
        records = self._compare(_READY, same, {"dp": int(parallel.attn_dp_rank)})
        self._progress.dp_ranks = tuple(int(record["dp"]) for record in records)

    def _compare(self, prefix: str, record: Record, own: Record | None = None) -> list[Record]:
        """Exchange records; ``own`` is what ranks may differ in. Raises StartupError."""
        store, rank, world = group()
        if world == 1:
            return [{**record, **(own or {})}]
        try:
            records = publish_and_collect(
                store, prefix, rank, world, {**record, **(own or {})}, self._settings.exchange_seconds
            )
        except Missing as missing:
            who = ", ".join(map(str, missing.ranks))
            raise refuse(
                f"rank {who} did not say what it runs within {self._settings.exchange_seconds:g} s (rank {rank} "
                "waited). Most likely the plugin is not active there: install sglang-bcg-dsa on that node and name "
                "it in --plugins there too. If that rank is merely slow to start, raise audit.exchange_seconds"
            ) from None
        if lines := differences([{name: got.get(name) for name in got if name not in (own or {})} for got in records]):
            raise refuse("the ranks do not run the same: " + " | ".join(lines))
        return records

    # ------------------------------------------------------------------ marks

    def on_receive(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Requests come from another rank, at every step: if that one is stopped before it votes, it shows only here."""
        return self._marked(self._receipt, None, original, *args, **kwargs)

    def on_run(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """A forward is launched; without overlap, or where it waits for counts, it also runs."""
        return self._marked(FORWARD, batch.forward_mode, original, scheduler, batch, *args, **kwargs)

    def on_results(self, original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """The scheduler waits for a forward's results: with overlap, hangs of the device show here."""
        return self._marked(RESULTS, batch.forward_mode, original, scheduler, batch, *args, **kwargs)

    def _marked(self, phase: str, mode: Any, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before = self._progress.enter(phase, mode)
        try:
            return original(*args, **kwargs)
        except RuntimeError as error:
            # A peer that ends breaks the others' collectives: they know who it was, the error does not say.
            if name := self._progress.collective_of(error):
                logger.critical("sglang-bcg-dsa: collective %s failed (%s): %s", name, error, self._rolls.call())
            raise
        finally:
            self._progress.leave(before)

    def _place(self, frame: FrameType, below: FrameType | None) -> str:
        from sglang_bcg_dsa.engine import replay_position

        return replay_position(frame, below, self._loop)

    # ------------------------------------------------------------------ watchdog

    def _watch(self) -> None:
        """The watchdog's thread. It waits for nothing that another rank could keep from coming."""
        limit, progress, rolls = self._settings.stall_seconds, self._progress, self._rolls
        tick = min(limit / 4, rollcall.ANSWER_SECONDS / 2)
        last = awake = time.monotonic()
        while True:
            _arm_faulthandler(limit)
            self._asked.wait(tick)
            now = time.monotonic()
            if now - last > tick + rollcall.ANSWER_SECONDS:
                awake = now
            last = now
            phase, since, _ = progress.at
            stalled = phase in LIMITED and now - max(since, awake) > limit
            if not stalled and not self._asked.is_set():
                continue
            if not rolls.spoken:
                bring_down_within(3 * rollcall.ANSWER_SECONDS)
                self._report(phase if stalled else "")
                bring_down()
            return  # the scheduler's thread found out itself, and ends this process

    def _listen(self) -> None:
        """The thread that looks whether another rank asks. Apart from the watchdog's: the store can keep it waiting."""
        while not self._rolls.asked():
            time.sleep(rollcall.ANSWER_SECONDS / 2)
        self._asked.set()

    def _report(self, stalled: str) -> None:
        """This rank's report, and then either its answer or, where it stalled itself, what all answered.

        In this order: whoever has all answers ends the server, and by then all reports are written.
        """
        rank = group()[1]
        logger.critical("sglang-bcg-dsa: report of rank %d: it %s. Stacks:\n%s", rank, self._progress.describe(), stacks())
        if stalled:
            limit = self._settings.stall_seconds
            logger.critical("sglang-bcg-dsa: %s for %g s: %s. Stopping the server", _STALLED[stalled], limit, self._rolls.call())
        else:
            self._rolls.answer()
            # The rank that asked ends its server; this one's may be on another node.
            time.sleep(rollcall.ANSWER_SECONDS)


def _arm_faulthandler(seconds: float) -> None:
    """Have the stacks written should this not be called again in time: then no Python thread runs here."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds, file=sys.__stderr__)
