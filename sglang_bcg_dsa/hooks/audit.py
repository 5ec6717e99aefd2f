"""Builtin feature ``audit``: ranks compare what they run, and a rank that stalls is named.

Contract: before the first vote every rank has seen every other's plugin version, feature states,
reasons and ladder, and a difference has stopped the start. A rank that waits for the others'
votes longer than ``audit.stall_seconds`` asks them where they are; each that still can answers
and logs its Python stacks; the waiting rank logs who is missing and stops the server. A thread on
every rank does this, over the key-value store and not over a collective. A rank that merely does
not vote, because nothing is asked of it, is left alone.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

from sglang_bcg_dsa import __version__
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.exchange import Missing, differences, publish_and_collect
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.rollcall import ANSWER_SECONDS, RollCall, group
from sglang_bcg_dsa.seams import SeamSet
from sglang_bcg_dsa.stopping import bring_down, refuse

logger = logging.getLogger(__name__)

_START = "sglang_bcg_dsa/start"


class AuditFeature:
    """The exchange at start and the watchdog."""

    name = "audit"

    def __init__(self, progress: Progress, rolls: RollCall, features: Callable[[], dict[str, Any]]) -> None:
        self._progress = progress
        self._rolls = rolls
        self._features = features
        self._exchanged = False

    # ------------------------------------------------------------------ plugin hooks

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        return Feature(self.name, State.SUPPLIED, "SGLang does not compare its ranks and does not name a stalled one")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._settings = config.audit
        self._table = reasons
        installer.around("runner.capture", self.on_capture)
        installer.after("scheduler.ready", self.on_ready)

    # ------------------------------------------------------------------ start-up

    def on_capture(self, original: Callable[..., Any], runner: Any) -> Any:
        """Compare with the other ranks before the first capture: captures hold collectives."""
        if not runner.model_runner.is_draft_worker:
            self._exchange(tuple(sorted(runner.capture_num_tokens)))
        return original(runner)

    def on_ready(self, result: Any, scheduler: Any) -> None:
        """The scheduler is built. Ranks without graphs have not compared yet."""
        self._exchange(())
        if group()[2] > 1:
            threading.Thread(target=self._watch, name="bcg-dsa-watchdog", daemon=True).start()

    def _exchange(self, ladder: tuple[int, ...]) -> None:
        if self._exchanged:
            return
        self._exchanged = True
        store, rank, world = group()
        if world == 1:
            return
        record = {
            "plugin version": __version__,
            "reasons": list(self._table.names),
            "ladder": list(ladder),
            **self._features(),
        }
        try:
            records = publish_and_collect(
                store, _START, rank, world, record, self._settings.exchange_seconds
            )
        except Missing as missing:
            who = ", ".join(map(str, missing.ranks))
            raise refuse(
                f"rank {who} did not say what it runs within {self._settings.exchange_seconds:g} s (rank {rank} "
                "waited). Most likely the plugin is not active there: install sglang-bcg-dsa on that node and name "
                "it in --plugins there too. If that rank is merely slow to start, raise audit.exchange_seconds"
            ) from None
        if lines := differences(records):
            raise refuse("the ranks do not run the same: " + " | ".join(lines))
        if rank == 0:
            logger.info("sglang-bcg-dsa: %d ranks agree on version, features, reasons and ladder", world)

    # ------------------------------------------------------------------ watchdog

    def _watch(self) -> None:
        """The watchdog's thread. It acts only while a vote is overdue."""
        limit, progress, rolls = self._settings.stall_seconds, self._progress, self._rolls
        rank = group()[1]
        while True:
            time.sleep(min(limit / 4, ANSWER_SECONDS / 2))
            if not progress.step or progress.seconds <= limit:
                continue
            if progress.voting:
                logger.critical(
                    "sglang-bcg-dsa: no verdict for %g s: %s. Stopping the server. Stacks of rank %d:\n%s",
                    limit, rolls.call(), rank, _stacks(),
                )  # fmt: skip
                bring_down()
            elif rolls.asked():
                # Another rank waits for this one, and will stop the server.
                logger.critical(
                    "sglang-bcg-dsa: rank %d %s, and other ranks wait for it. Its stacks:\n%s",
                    rank, progress.describe(), _stacks(),
                )  # fmt: skip
                rolls.answer()
                return


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
