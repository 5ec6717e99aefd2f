"""Ranks tell each other what they run before the first vote, and stop where they differ.

Contract: every rank publishes one record and reads all others', through the process group's own
key-value store. No collective is used: a rank without the plugin would leave it waiting, or
answer it with a collective of its own. A rank that publishes nothing within the limit is named.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

Record = Mapping[str, Any]


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that is used here."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def wait(self, keys: list[str], timeout: timedelta, /) -> None: ...
    def check(self, keys: list[str], /) -> bool: ...


class Missing(Exception):
    """Some ranks published nothing in time. ``ranks`` names them."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(ranks)
        self.ranks = tuple(ranks)


def publish_and_collect(
    store: Store, prefix: str, rank: int, world: int, record: Record, seconds: float
) -> list[Record]:
    """Publish ``record`` and return all ranks' records in rank order.

    Raises Missing when some rank has not published after ``seconds``.
    """
    store.set(f"{prefix}/{rank}", json.dumps(record, sort_keys=True))
    keys = [f"{prefix}/{other}" for other in range(world)]
    try:
        store.wait(keys, timedelta(seconds=seconds))
    except Exception as error:  # torch raises DistStoreError or RuntimeError, by release, on a time-out
        missing = [r for r, key in enumerate(keys) if not store.check([key])]
        if not missing:
            raise
        raise Missing(missing) from error
    return [json.loads(store.get(key)) for key in keys]


def differences(records: Sequence[Record]) -> list[str]:
    """One line per field that is not the same on all ranks, with who has what."""
    lines = []
    for field in sorted({key for record in records for key in record}):
        holders: dict[str, list[int]] = {}
        for rank, record in enumerate(records):
            holders.setdefault(json.dumps(record.get(field), sort_keys=True), []).append(rank)
        if len(holders) > 1:
            lines.append(
                f"{field}: " + "; ".join(f"rank {', '.join(map(str, who))}: {what}" for what, who in holders.items())
            )
    return lines
