"""Where this rank is in the sequence of votes. Written by the scheduler's thread, read by others."""

from __future__ import annotations

import time


class Progress:
    """Number of the last vote, whether this rank waits in it, and since when. Held for each gather."""

    __slots__ = ("since", "step", "voting")

    def __init__(self) -> None:
        self.step = 0
        self.voting = False
        self.since = time.monotonic()

    def __enter__(self) -> None:
        """The gather of a vote begins."""
        self.step += 1
        self.since = time.monotonic()
        self.voting = True

    def __exit__(self, *error: object) -> None:
        """It ended, well or not."""
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
