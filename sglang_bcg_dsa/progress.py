"""Where this rank is in the sequence of votes. Written by the scheduler's thread, read by others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Progress:
    """Number of the last vote, whether this rank waits in it, and since when."""

    __slots__ = ("since", "step", "voting")

    def __init__(self) -> None:
        self.step = 0
        self.voting = False
        self.since = time.monotonic()

    @contextmanager
    def in_vote(self) -> Iterator[None]:
        """The gather of one vote."""
        self.step += 1
        self.since = time.monotonic()
        self.voting = True
        try:
            yield
        finally:
            self.since = time.monotonic()
            self.voting = False

    @property
    def seconds(self) -> float:
        """Seconds since the last vote began or ended."""
        return time.monotonic() - self.since

    def describe(self) -> str:
        """One clause for a message."""
        if self.voting:
            return f"waits since {self.seconds:.1f} s for the others' votes, step {self.step}"
        return f"has not voted since {self.seconds:.1f} s, after step {self.step}"
