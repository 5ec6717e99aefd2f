"""Asks every rank where it is, over the process group's key-value store.

Contract: never a collective, never waits longer than twice :data:`ANSWER_SECONDS`, never raises: it is
used when something already went wrong. A rank that cannot answer is reported as such. A process
calls or answers once: what it found ends the server.

The store lives in rank 0's process. If that is stopped, every operation on the store waits for
torch's own limit, minutes; so they run in threads here, and that one does not end says: it is rank 0.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_dsa.exchange import Missing, Store, publish_and_collect
from sglang_bcg_dsa.progress import Progress

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
_PREFIX = "sglang_bcg_dsa/stall"
_SILENT = "does not answer: it is stopped, dead or holds the interpreter"


def group() -> tuple[Store, int, int]:
    """The world's key-value store, this process's rank in it, and its size."""
    import torch.distributed as dist

    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("torch.distributed is not initialised")
    return world.get_group_store(), dist.get_rank(), dist.get_world_size()


class RollCall:
    """One rank's side of the question "where is everybody?"."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.spoken = False
        """This rank has called or answered."""

    def call(self) -> str:
        """Ask; one clause per rank, in rank order, and who keeps the others waiting."""
        self.spoken = True
        mine = self._mine()
        try:
            store, rank, world = group()
        except (ValueError, RuntimeError) as error:
            return f"this rank {mine['where']}; there is no process group to ask others in ({error})"
        found: dict[int, Mapping[str, Any]] = {}
        if not _in_time(lambda: found.update(self._ask(store, rank, world, mine))):
            found = {0: {"where": f"{_SILENT} (it holds the store through which ranks are asked)"}}
        found[rank] = mine
        lines = "; ".join(f"rank {other} {record['where']}" for other, record in sorted(found.items()))
        return f"{lines}. {suspects(found)}"

    def _ask(self, store: Store, rank: int, world: int, mine: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
        found: dict[int, Mapping[str, Any]] = {}
        try:
            store.set(f"{_PREFIX}/asked", "1")
            try:
                found = dict(enumerate(publish_and_collect(store, _PREFIX, rank, world, mine, ANSWER_SECONDS)))
            except Missing as missing:
                for other in range(world):
                    silent = other in missing.ranks
                    found[other] = {"where": _SILENT} if silent else json.loads(store.get(f"{_PREFIX}/{other}"))
        except Exception as error:  # the store lives in rank 0's process and may be gone with it
            found[0 if rank else 1] = {"where": f"cannot be asked ({type(error).__name__}: {error})"}
        return found

    def asked(self) -> bool:
        """Whether some rank has called. False also when there is nowhere to look. May wait for minutes: see above."""
        try:
            return group()[0].check([f"{_PREFIX}/asked"])
        except Exception:  # by release: DistStoreError, DistNetworkError, RuntimeError
            return False

    def answer(self) -> None:
        """Say where this rank is, if there is still somewhere to say it."""
        self.spoken = True
        mine = json.dumps(self._mine())

        def say(store: Store, rank: int) -> None:
            try:
                store.set(f"{_PREFIX}/{rank}", mine)
            except Exception as error:  # as above
                logger.critical("sglang-bcg-dsa: the other ranks cannot be told (%s: %s)", type(error).__name__, error)

        store, rank, _ = group()
        _in_time(lambda: say(store, rank))

    def _mine(self) -> dict[str, Any]:
        progress = self._progress
        return {"where": progress.describe(), "step": progress.step, "waits": progress.waits}


def _in_time(operation: Callable[[], None]) -> bool:
    """Whether operations on the store ended in time; where not, their thread is left behind."""
    thread = threading.Thread(target=operation, name="bcg-dsa-store", daemon=True)
    thread.start()
    thread.join(2 * ANSWER_SECONDS)
    return not thread.is_alive()


def suspects(found: Mapping[int, Mapping[str, Any]]) -> str:
    """Who keeps the others waiting, as a sentence: who is silent, else behind, else the only ones that do not wait.

    Of those behind, one that waits may wait for another of them: a rank whose batches it shares (attention TP).
    """
    silent = [rank for rank, record in found.items() if "step" not in record]
    last = max((record["step"] for record in found.values() if "step" in record), default=0)
    behind = [rank for rank, record in found.items() if record.get("step", last) < last]
    busy = [rank for rank, record in found.items() if not record.get("waits", True)]
    late = silent or [rank for rank in behind if rank in busy] or behind or (busy if len(busy) < len(found) else [])
    if not late:
        return "No rank is behind the others: compare where they are"
    return f"Rank {', '.join(map(str, sorted(late)))} keeps the others waiting"
