"""Breaks: a function that writes a caller's buffer, run eagerly between two captured segments.

Contract, in order, at capture: the segment that led here is ended; then, if the break is coupled
to other ranks, all of them meet at a barrier, because ending a segment takes a different time on
each; then the *stub* stands in for the body, so that no communication runs while capturing; then
a new segment begins. At warm-up and replay the body runs. Outside a capture the call is the body.

* The caller allocates the output inside the captured region; the break only mutates it and
  returns None. A break that returns something is refused: the next segment would have baked its
  address in.
* Ownership: a break reads and writes staging buffers of its own, and nothing else by address. The
  segment before it copies the inputs in, the segment after it copies the output out. Memory of a
  graph's pool is pinned as a whole but its blocks are handed out again to graphs captured later,
  so an input held weakly becomes the memory of a later bucket (sgl-project/sglang#37606: a
  silently wrong token), and inputs held strongly cost a block for each layer and bucket (29 GiB
  for 58 layers of DeepSeek-V3.2's width and the 42 default buckets up to 2048 tokens, computed).
  Staging costs one set of buffers for the largest bucket, shared by all layers and buckets
  because a break is over before the next one begins (59 MB in that shape), and two copies of the
  hidden states a layer. :attr:`Break.staged_bytes` says how much it is.
* What a caller keeps across a break (the shared experts' output) is safe in the graph's pool: its
  block is taken from its allocation to its last reference in capture order, a replay runs in that
  order, breaks allocate from the default pool because no capture is on then, and no other graph of
  the pool runs between two segments of one.
* A break inside a break, ours or the host's, runs inline. A break that fails while capturing
  leaves no half-open capture behind.

Not promised: that a body reads only its arguments and state that lives as long. A value that the
body takes from a closure is the author's to keep alive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
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


_replaying: ContextVar[bool] = ContextVar("sglang_bcg_dsa_replaying", default=False)


def replaying() -> bool:
    """Whether the running break body is part of a replay: Python around it did not run then."""
    return _replaying.get()


class Staging:
    """Buffers of one kind of break: one for each argument, as large as the largest bucket needs.

    A larger request gets a new buffer; graphs captured with the old one keep it. Capturing from
    the largest bucket down, as the host does, makes one buffer each.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[Hashable, torch.dtype, torch.device, torch.Size], torch.Tensor] = {}

    def like(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous view of ``tensor``'s shape into the buffer of argument ``name``."""
        if tensor.dim() == 0:
            tensor = tensor.unsqueeze(0)
        key = (name, tensor.dtype, tensor.device, tensor.shape[1:])
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape[0] < tensor.shape[0]:
            buffer = self._buffers[key] = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        return buffer[: tensor.shape[0]]

    @property
    def bytes(self) -> int:
        """Bytes of the buffers in use."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self._buffers.values())


class Break:
    """One kind of break. Call it as ``brk(output, *inputs, **inputs)``.

    ``body`` and ``stub`` take the same arguments; ``output`` is a tensor the caller allocated.
    ``current_capture`` returns the capture with a segment open on this thread or None. ``barrier``, for a
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
        self._staging = Staging()
        functools.update_wrapper(self, body)

    @property
    def staged_bytes(self) -> int:
        """Bytes of this break's staging buffers."""
        return self._staging.bytes

    def __call__(self, output: torch.Tensor, /, *args: Any, **kwargs: Any) -> None:
        capture = self._current_capture()
        if capture is None:
            self._refuse_result(self._body(output, *args, **kwargs))
            return
        staged = self._staging.like("output", output)
        args = tuple(self._stage(i, value) for i, value in enumerate(args))
        kwargs = {name: self._stage(name, value) for name, value in kwargs.items()}
        capture.end_segment()
        try:
            if self._barrier is not None:
                self._barrier()
            self._refuse_result(self._stub(staged, *args, **kwargs))
            capture.add_break(functools.partial(self._replay, staged, *args, **kwargs))
        finally:
            # Also after an error: the host closes its capture by ending the running segment, and
            # without one it would report that instead of the error.
            capture.begin_segment()
        output.copy_(staged)

    def _stage(self, name: Hashable, value: Any) -> Any:
        """Copy a tensor into its staging buffer, inside the running segment."""
        if isinstance(value, torch.Tensor):
            staged = self._staging.like(name, value)
            staged.copy_(value)
            return staged
        if isinstance(value, (tuple, list, dict)) and any(isinstance(leaf, torch.Tensor) for leaf in _leaves(value)):
            raise CaptureError(
                f"argument {name} of break {self.name} is a {type(value).__name__} with tensors in it; "
                "pass each tensor as an argument of its own, so that it can be staged"
            )
        return value

    def _replay(self, output: torch.Tensor, /, *args: Any, **kwargs: Any) -> None:
        token = _replaying.set(True)
        try:
            self._body(output, *args, **kwargs)
        finally:
            _replaying.reset(token)

    def _refuse_result(self, result: object) -> None:
        if result is not None:
            raise CaptureError(
                f"break {self.name} returned a {type(result).__name__}; "
                "expected None: write into the output the caller allocated, the next segment reads only that"
            )

    @property
    def name(self) -> str:
        """The body's name, or its class's where it is an object."""
        return str(getattr(self._body, "__name__", type(self._body).__name__))


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from _leaves(item)
    else:
        yield value
