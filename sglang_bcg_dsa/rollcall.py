"""Asks every rank where it is, over the process group's key-value store.

Contract: never a collective, never waits longer than :data:`ANSWER_SECONDS`, never raises: it is
used when something already went wrong. A rank that cannot answer is reported as such.
"""

from __future__ import annotations

import json
import logging

from sglang_bcg_dsa.exchange import Missing, Store, publish_and_collect
from sglang_bcg_dsa.progress import Progress

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
_PREFIX = "sglang_bcg_dsa/stall"


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

    def call(self) -> str:
        """Ask; one clause per rank, in rank order."""
        mine = self._progress.describe()
        try:
            store, rank, world = group()
        except (ValueError, RuntimeError) as error:
            return f"this rank {mine}; there is no process group to ask others in ({error})"
        where = {rank: mine}
        try:
            store.set(f"{_PREFIX}/asked", "1")
            records = publish_and_collect(store, _PREFIX, rank, world, {"where": mine}, ANSWER_SECONDS)
            where = {other: str(record["where"]) for other, record in enumerate(records)}
        except Missing as missing:
            for other in range(world):
                if other in missing.ranks:
                    where[other] = "does not answer: it is stopped, dead or holds the interpreter"
                elif other != rank:
                    where[other] = str(json.loads(store.get(f"{_PREFIX}/{other}"))["where"])
        except Exception as error:  # the store lives in rank 0's process and may be gone with it
            where[0 if rank else 1] = f"cannot be asked ({type(error).__name__}: {error})"
        return "; ".join(f"rank {other} {text}" for other, text in sorted(where.items()))

    def asked(self) -> bool:
        """Whether some rank has called. True also when the store is gone: then its owner is."""
        try:
            return group()[0].check([f"{_PREFIX}/asked"])
        except Exception:  # by release: DistStoreError, DistNetworkError, RuntimeError
            return True

    def answer(self) -> None:
        """Say where this rank is, if there is still somewhere to say it."""
        try:
            store, rank, _ = group()
            store.set(f"{_PREFIX}/{rank}", json.dumps({"where": self._progress.describe()}))
        except Exception as error:  # as above
            logger.critical("sglang-bcg-dsa: the other ranks cannot be told (%s: %s)", type(error).__name__, error)
