"""Where this rank is. The one owner of that question: marked by the scheduler's thread, read by the watchdog.

Contract: a mark is one write of one tuple, so that no reader sees a phase with another phase's time.
Each receipt of requests, vote, forward and processing of results is marked (0.5 us, twice), no segment and no break:
which of them a rank is in is read from the marked thread's stack once somebody asks, so a replay
pays nothing for it. Reading never raises and needs the interpreter, not the thread.

Not promised: how far the device is. The processor runs ahead of it, up to the next wait for it;
with DeepEP each MoE break is such a wait.
"""

from __future__ import annotations

import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.vote import Verdict

BETWEEN, RECEIVE, VOTE, FORWARD, RESULTS, CAPTURE = "between", "receive", "vote", "forward", "results", "capture"
LIMITED = frozenset({RECEIVE, VOTE, FORWARD, RESULTS})
"""Phases that are over within ``audit.stall_seconds`` or never. A capture compiles kernels and has limits of
its own, and a rank between steps may have nothing to do; an idle one receives no requests again and again."""
_COLLECTIVE_MODULES = ("torch.distributed", "deep_ep")


Mark = tuple[str, float, Any]
"""A phase, when it began (``time.monotonic``), and the host's forward mode in a forward. Plain, as it is made often."""


class Progress:
    """The scheduler step in flight, its verdict, and the phase this rank is in."""

    __slots__ = ("at", "collectives", "dp_ranks", "replay", "step", "table", "thread", "verdict")

    def __init__(self) -> None:
        self.step = 0
        self.verdict: Verdict | None = None
        self.at: Mark = (BETWEEN, time.monotonic(), None)
        self.thread = threading.get_ident()
        self.table = ReasonTable()
        self.dp_ranks: tuple[int, ...] = ()
        """The DP rank of each rank of the world, once they have compared."""
        self.collectives: tuple[str, ...] = ()
        """Qualified names of host functions, or beginnings of such, that run collectives."""
        self.replay: Callable[[FrameType, FrameType | None], str] = lambda frame, below: ""
        """Says where in a replay the host's loop is, from a frame and the one it called; empty for any other frame."""

    def enter(self, phase: str, mode: Any = None) -> Mark:
        """A phase begins; give what is returned to :meth:`leave`. Phases nest."""
        before = self.at
        self.thread = threading.get_ident()
        self.at = (phase, time.monotonic(), mode)
        return before

    def leave(self, before: Mark) -> None:
        """It ended, well or not."""
        self.at = (before[0], time.monotonic(), before[2])

    def frames(self) -> Iterator[FrameType]:
        """The marked thread's stack, innermost frame first."""
        frame = sys._current_frames().get(self.thread)
        while frame is not None:
            yield frame
            frame = frame.f_back

    def collective(self) -> str:
        """The collective the marked thread is in, by the innermost function that runs one; empty if none."""
        return next(filter(None, map(self._collective_in, self.frames())), "")

    def collective_of(self, error: BaseException) -> str:
        """The collective that raised an error; empty if it came from elsewhere."""
        last = None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            last = frame
        return self._collective_in(last) if last is not None else ""

    def _collective_in(self, frame: FrameType) -> str:
        name = frame.f_code.co_qualname
        ours = frame.f_globals.get("__name__", "").startswith(_COLLECTIVE_MODULES) or name.startswith(self.collectives)
        return name if ours else ""

    @property
    def waits(self) -> bool:
        """Whether this rank waits for others, as far as its processor's side shows."""
        return self.at[0] == VOTE or bool(self.collective())

    def describe(self) -> str:
        """Everything that is known, as one clause for a message."""
        phase, since, mode = self.at
        parts = [_PHASES[phase].format(f"{time.monotonic() - since:.1f} s", str(getattr(mode, "name", "")).lower())]
        parts.append(f"{'after' if phase in (BETWEEN, RECEIVE) else 'in'} step {self.step}")
        if (verdict := self.verdict) is not None:
            noes = [f"DP rank {vote.rank}: {self.table.text(vote.against)}" for vote in verdict.noes()[:4]]
            why = f"replay, bucket {verdict.bucket}" if verdict.replay else f"eager ({'; '.join(noes)})"
            parts.append(f"verdict {why}")
        if place := self._place():
            parts.append(place)
        found = self.collective()
        parts.append(f"in collective {found}" if found else f"last collective: the vote of step {self.step}")
        if (frame := next(self.frames(), None)) is not None:
            parts.append(f"at {frame.f_code.co_qualname} ({frame.f_code.co_filename}:{frame.f_lineno})")
        return ", ".join(parts)

    def _place(self) -> str:
        below: FrameType | None = None
        try:
            for frame in self.frames():
                if place := self.replay(frame, below):
                    return place
                below = frame
        except Exception as error:  # the loop of an engine nobody has seen; the rest of the report is worth having
            return f"place in the replay unknown ({type(error).__name__}: {error})"
        return ""


_PHASES = {
    BETWEEN: "has not voted since {0}",
    RECEIVE: "receives requests since {0}",
    VOTE: "waits since {0} for the others' votes",
    FORWARD: "runs a forward ({1}) since {0}",
    RESULTS: "waits since {0} for the results of a forward",
    CAPTURE: "captures since {0}",
}


def stacks() -> str:
    """The Python stacks of all threads but this one, also of threads that are in C."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frame))
        for ident, frame in sys._current_frames().items()
        if ident != threading.get_ident()
    )
