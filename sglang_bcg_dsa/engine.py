"""The adapter to the host's capture engine; the only module that knows its internals.

There is one engine, the host's. A break of ours (:mod:`sglang_bcg_dsa.breaks`) attaches to a
capture of the host's through the four calls here, each a row of the seam table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph


class HostCapture:
    """One ``BreakableCUDAGraphCapture`` of the host, as :class:`sglang_bcg_dsa.breaks.Capture`."""

    def __init__(self, capture: Any) -> None:
        self._capture = capture

    def end_segment(self) -> None:
        """End the running segment; the host also joins side streams that were forked in it."""
        self._capture._end_current_segment()

    def add_break(self, run: Callable[[], None]) -> None:
        """Append to the graph's breaks: the host runs break ``i`` after segment ``i``."""
        self._capture.cuda_graph._break_fns.append(run)

    def begin_segment(self) -> None:
        """Begin the next segment in the same pool and stream."""
        self._capture._begin_new_segment()


def current_capture() -> HostCapture | None:
    """The host's capture in progress on this thread, or None."""
    capture = breakable_cuda_graph._current_capture_var.get()
    return None if capture is None else HostCapture(capture)


def in_breakable_region() -> bool:
    """Whether the running forward is warmed up, captured or replayed as a breakable graph."""
    return bool(is_in_breakable_cuda_graph())
