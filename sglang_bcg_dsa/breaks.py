"""Breaks: a function that writes a caller's buffer, run eagerly between two captured segments.

Contract, in order, at capture: the segment that led here is ended; then, if the break is coupled
to other ranks, all of them meet at a barrier, because ending a segment takes a different time on
each; then the *stub* stands in for the body, so that no communication runs while capturing; then
a new segment begins. At warm-up and replay the body runs. Outside a capture the call is the body.

* The caller allocates the output inside the captured region; the break only mutates it and
  returns None. A break that returns something is refused: the next segment would have baked its
  address in.
* Ownership: the graph holds strong references to everything the break reads or writes, as long
  as the graph lives. Memory of a graph's pool is pinned as a whole but its blocks are handed out
  again to graphs captured later, so a weakly held input of an early bucket becomes the memory of
  a later one (sgl-project/sglang#37606: a silently wrong token). The cost is that these blocks
  are not shared between buckets; :attr:`Break.held_bytes` says how much that is.
* A break inside a break runs inline. A break that fails while capturing leaves no half-open
  capture behind.

Not promised: that a body reads only its arguments and state that lives as long. A value that the
body takes from a closure is the author's to keep alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch

from sglang_bcg_dsa.errors import CaptureError


class Capture(Protocol):
    """A capture in progress, as the host's engine offers it (see ``engine``)."""

    def end_segment(self) -> None:
        """End the running segment."""

    def add_break(self, run: Callable[[], None]) -> None:
        """Add an eager call after the segment just ended; it and all it holds live with the graph."""

    def begin_segment(self) -> None:
        """Begin the next segment."""


_inside_break: ContextVar[bool] = ContextVar("sglang_bcg_dsa_inside_break", default=False)


@contextmanager
def _inside() -> Iterator[None]:
    token = _inside_break.set(True)
    try:
        yield
    finally:
        _inside_break.reset(token)


class Break:
    """One kind of break. Call it as ``brk(output, *inputs, **inputs)``.

    ``body`` and ``stub`` take the same arguments; ``output`` is a tensor the caller allocated.
    ``current_capture`` returns the capture in progress on this thread or None. ``barrier``, for a
    body coupled to other ranks, blocks until every rank has come here or raises naming who has
    not.
    """

    def __init__(
        self,
        body: Callable[..., None],
        *,
        current_capture: Callable[[], Capture | None],
        stub: Callable[..., None] | None = None,
        barrier: Callable[[], None] | None = None,
    ) -> None:
        self._body = body
        self._stub = stub or body
        self._current_capture = current_capture
        self._barrier = barrier
        self._held: dict[int, int] = {}
        functools.update_wrapper(self, body)

    @property
    def held_bytes(self) -> int:
        """Bytes of distinct storages that captured graphs hold for this break."""
        return sum(self._held.values())

    def __call__(self, output: torch.Tensor, /, *args: Any, **kwargs: Any) -> None:
        capture = None if _inside_break.get() else self._current_capture()
        if capture is None:
            self._refuse_result(self._body(output, *args, **kwargs))
            return
        capture.end_segment()
        try:
            if self._barrier is not None:
                self._barrier()
            with _inside():
                self._refuse_result(self._stub(output, *args, **kwargs))
            capture.add_break(functools.partial(self._replay, output, *args, **kwargs))
            self._account((output, args, kwargs))
        finally:
            # Also after an error: the host closes its capture by ending the running segment, and
            # without one it would report that instead of the error.
            capture.begin_segment()

    def _replay(self, output: torch.Tensor, /, *args: Any, **kwargs: Any) -> None:
        with _inside():
            self._body(output, *args, **kwargs)

    def _refuse_result(self, result: object) -> None:
        if result is not None:
            raise CaptureError(
                f"break {getattr(self._body, '__qualname__', self._body)} returned a {type(result).__name__}; "
                "expected None: write into the output the caller allocated, the next segment reads only that"
            )

    def _account(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            self._held[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, (tuple, list)):
            for item in value:
                self._account(item)
        elif isinstance(value, dict):
            for item in value.values():
                self._account(item)
