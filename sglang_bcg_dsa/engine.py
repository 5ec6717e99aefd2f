"""The adapter to the host's capture engine; the only module that knows its internals.

There is one engine, the host's. A break of ours (:mod:`sglang_bcg_dsa.breaks`) attaches to a
capture of the host's through the calls here, each a row of the seam table. A benchmark looks into a
replay through :class:`BreakTimes`, a stall report through :func:`replay_position`; nothing else does.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any

import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.context import is_in_breakable_cuda_graph

host_break: Callable[[Callable[..., None]], Callable[..., None]] = breakable_cuda_graph.eager_on_graph(True)
"""The host's own kind of break. It keeps the addresses of its tensors, not the tensors: right for what the
segment before writes at each replay, at no cost in memory."""


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
    """The host's capture with a segment open on this thread; None outside captures and inside any break, whoever's."""
    capture = breakable_cuda_graph._current_capture_var.get()
    return None if capture is None or capture._current_graph is None else HostCapture(capture)


def capturing() -> bool:
    """Whether a breakable graph is being captured on this thread, in a segment or in a break."""
    return breakable_cuda_graph._current_capture_var.get() is not None


def in_breakable_region() -> bool:
    """Whether the running forward is warmed up, captured or replayed as a breakable graph."""
    return bool(is_in_breakable_cuda_graph())


def replay_position(frame: FrameType, below: FrameType | None, loop: str) -> str:
    """Where in a replay a frame of the host's replay loop (``loop``: its qualified name) is; empty for other frames.

    ``below``: the frame it has called. Read from another thread while the loop's own waits somewhere
    below it. The loop has one whole number among its locals, the segment's; it is in a break if it
    has called a Python function other than a segment's ``replay``.
    """
    if frame.f_code.co_qualname != loop:
        return ""
    local = frame.f_locals
    graph, index = local["self"], next((v for v in local.values() if type(v) is int), None)
    if index is None:
        return "at the start of a replay"
    breaks = graph._break_fns
    count = f"segment {index + 1} of {len(graph._segments)}"
    if index < len(breaks) and below is not None and below.f_code.co_name != "replay":
        return f"{count} replayed, in break {index + 1} of {len(breaks)} ({_break_name(breaks[index])})"
    return count


class BreakTimes:
    """Times the segments and breaks of replays while entered; outside it a replay is the host's own.

    Device time of a part runs from its first moment on the stream to its last, waits for the
    processor included; processor time is what launching it took. Knows a break by the function that
    runs in it.
    """

    def __init__(self) -> None:
        self._on = False
        self._marks: list[tuple[str, Any, Any, float]] = []

    def __enter__(self) -> BreakTimes:
        self._on, self._marks = True, []
        return self

    def __exit__(self, *exc: object) -> None:
        self._on = False

    def on_replay(self, original: Callable[[Any], None], graph: Any) -> None:
        """Stands around ``BreakableCUDAGraph.replay``."""
        if not self._on:
            return original(graph)
        # The host's own loop, over timed stand-ins.
        return original(
            SimpleNamespace(
                _segments=[SimpleNamespace(replay=self._timed("segments", part.replay)) for part in graph._segments],
                _break_fns=[self._timed(_break_name(run), run) for run in graph._break_fns],
            )
        )

    def _timed(self, name: str, run: Callable[[], Any]) -> Callable[[], None]:
        def timed() -> None:
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            start = time.perf_counter()
            run()
            seconds = time.perf_counter() - start
            after.record()
            self._marks.append((name, before, after, seconds))

        return timed

    def parts(self, replays: int) -> dict[str, dict[str, float]]:
        """By part: calls, device milliseconds and processor milliseconds of one replay of ``replays``."""
        torch.cuda.synchronize()
        found: dict[str, dict[str, float]] = {}
        for name, before, after, seconds in self._marks:
            part = found.setdefault(name, {"calls": 0, "gpu_ms": 0.0, "cpu_ms": 0.0})
            part["calls"] += 1 / replays
            part["gpu_ms"] += before.elapsed_time(after) / replays
            part["cpu_ms"] += seconds * 1e3 / replays
        return found


def _break_name(run: Any) -> str:
    """The function a break runs: ours is a partial of a Break's method, the host's is kept in a closure."""
    if isinstance(run, functools.partial):
        return str(run.func.__self__.name)  # type: ignore[attr-defined]
    for cell in run.__closure__ or ():
        if callable(cell.cell_contents):
            return str(cell.cell_contents.__name__)
    return str(run.__name__)
