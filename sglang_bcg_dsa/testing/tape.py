"""A CUDA graph without CUDA: record ATen calls once, run them again into the same storages.

Contract, which is that of ``torch.cuda.CUDAGraph``:

* Python between `TapeGraph.capture_begin` and `TapeGraph.capture_end` runs once. `TapeGraph.replay`
  re-runs the tensor operations recorded there and nothing else.
* Addresses are fixed at capture. A replay reads its inputs from the storages that were read then
  and
  leaves its results in the storages that were written then. A value that was put elsewhere since
  (metadata rebound instead of refreshed, a break's output that did not land) is not seen.
* A value that Python reads from a tensor during capture would be frozen into the graph. Such a
  read is
  refused with `HostReadDuringCapture`, which names it, the line, and what to do instead.

Which reads are refused: those of *every* tensor. On a GPU only tensors on the device make CUDA
complain; a read of a host tensor (a ``*_cpu`` copy) passes and is frozen all the same, so the
tape is stricter on purpose. Where the value really is the same at each replay, say so with
`allow_host_reads`. Refused are the operators which torch tags as having data-dependent output or
shape (``item``, ``nonzero``, ``masked_select``, ``unique``, boolean indexing...) and the methods
which reach no operator on the CPU (``tolist``, ``numpy``, ``cpu``...).

Limits. Capture also executes. There are no streams, so no race between them shows; there is no
memory pool: whatever a tape uses it keeps alive, so reuse of pool memory does not show either.
Reads that go through a raw pointer or a storage (``data_ptr``, ``untyped_storage``) are not seen,
nor are those made inside an operator implemented in Python, save through the methods above: an
operator is opaque, and replay calls it again. Only the capturing thread is watched. Other threads
may use the tensors freely.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

__all__ = ["HostReadDuringCapture", "TapeError", "TapeGraph", "allow_host_reads"]

_TORCH_DIR = str(Path(torch.__file__).parent)

# Methods of a tensor that hand its values to Python. On the CPU several of them reach no operator.
_READERS = frozenset(
    getattr(torch.Tensor, name)
    for name in (
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__array__",
        "__bool__",
        "__int__",
        "__float__",
        "__complex__",
        "__index__",
        "__contains__",
        "__dlpack__",
    )
)

# Read the split points through their pointer; torch resolves them before any operator is
# dispatched.
_SPLITTERS = frozenset((torch.tensor_split, torch.Tensor.tensor_split))


class TapeError(RuntimeError):
    """The tape was used in a way which a CUDA graph does not allow."""


class HostReadDuringCapture(TapeError):
    """Python read a tensor's value, or needed it for a shape, while a graph was captured.

    ``what`` is the call, ``where`` the innermost line outside torch as ``file:line in function``.
    """

    def __init__(self, what: str, where: str, source: str) -> None:
        self.what = what
        self.where = where
        super().__init__(
            f"{what} during graph capture\n"
            f"  at {where}\n"
            f"     {source}\n"
            "  The value would be frozen into the graph: each replay would use the one seen at\n"
            "  capture. Compute with tensors of fixed shape (torch.where, masks, a count kept on\n"
            "  the device), or move the code into a break, which runs eagerly at each replay. If\n"
            "  the value is the same at every replay, wrap the read in\n"
            "  sglang_bcg_dsa.testing.allow_host_reads('why')."
        )


class _ThreadState(threading.local):
    capturing: TapeGraph | None = None
    allowed: int = 0


_state = _ThreadState()


@contextmanager
def allow_host_reads(reason: str) -> Iterator[None]:
    """Permit host reads inside: the caller states why the value cannot change between replays."""
    if not reason.strip():
        raise ValueError("allow_host_reads needs the reason why the value cannot change")
    _state.allowed += 1
    try:
        yield
    finally:
        _state.allowed -= 1


def _refuse(what: str) -> None:
    if _state.allowed:
        return
    frame = next(
        (
            frame
            for frame in reversed(traceback.extract_stack())
            if frame.filename != __file__ and not frame.filename.startswith((_TORCH_DIR, "<"))
        ),
        None,
    )
    if frame is None:
        raise HostReadDuringCapture(what, "unknown", "")
    where = f"{frame.filename}:{frame.lineno} in {frame.name}"
    raise HostReadDuringCapture(what, where, frame.line or "")


class _RefuseReaders(TorchFunctionMode):
    """Refuses the readers that never reach the dispatcher for a tensor on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READERS:
            _refuse(f"Tensor.{func.__name__}()")
        if func in _SPLITTERS and any(
            isinstance(x, torch.Tensor) for x in (*args[1:2], *kwargs.values())
        ):
            _refuse(f"{func.__name__}() at points given by a tensor")
        return func(*args, **kwargs)


def _is_mask(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8)


def _needs_host_value(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    aten = torch.ops.aten
    if func is aten.index.Tensor:
        return any(map(_is_mask, args[1]))
    if func in (aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default):
        # A single value under a mask becomes masked_fill, which has a fixed shape.
        return any(map(_is_mask, args[1])) and args[2].numel() != 1
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    tags = func.tags
    return torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags


def _pin(tree: Any) -> Any:
    """The same tree, each tensor replaced by a view with its present shape.

    Later in-place changes of shape (``squeeze_``) of the caller's tensor then leave the record
    alone.
    """
    return tree_map_only(
        torch.Tensor,
        lambda t: t.as_strided(t.size(), t.stride(), t.storage_offset()),
        tree,
    )


class _Step(NamedTuple):
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: list[Any]

    def run(self) -> None:
        for kept, fresh in zip(
            self.out, tree_leaves(self.func(*self.args, **self.kwargs)), strict=True
        ):
            if isinstance(fresh, torch.Tensor):
                # A view, or a result written in place, is already where it belongs.
                if kept.data_ptr() != fresh.data_ptr():
                    kept.copy_(fresh)
            elif isinstance(fresh, torch.ScriptObject) and hasattr(fresh, "wait"):
                fresh.wait()  # an asynchronous collective's handle


class TapeGraph(TorchDispatchMode):
    """A stand-in for ``torch.cuda.CUDAGraph``; see the head of this module."""

    def __init__(self, keep_graph: bool = False) -> None:
        super().__init__()
        self._steps: list[_Step] = []
        self._stack: ExitStack | None = None
        self._captured = False
        self._pool: tuple[int, int] = (0, 0)

    def capture_begin(
        self, pool: tuple[int, int] | None = None, capture_error_mode: str = "global"
    ) -> None:
        """Start recording this thread's tensor operations. Captures do not nest."""
        if _state.capturing is not None:
            raise TapeError("capture_begin: another graph is being captured in this thread")
        if self._captured:
            raise TapeError("capture_begin: this graph holds a capture; reset() it first")
        self._pool = pool or (0, 0)
        with ExitStack() as stack:
            stack.enter_context(_RefuseReaders())
            stack.enter_context(self)
            self._stack = stack.pop_all()
        _state.capturing = self

    def capture_end(self) -> None:
        """Stop recording."""
        if _state.capturing is not self or self._stack is None:
            raise TapeError("capture_end: this graph is not being captured in this thread")
        _state.capturing = None
        self._captured = True
        stack, self._stack = self._stack, None
        stack.close()

    def instantiate(self) -> None:
        """Nothing to build: a tape can be replayed as it is."""
        self._require_capture("instantiate")

    def replay(self) -> None:
        """Run the recorded operations again, into the storages of the capture."""
        self._require_capture("replay")
        if _state.capturing is not None:
            raise TapeError("replay: a graph is being captured in this thread")
        with torch.no_grad():
            for step in self.steps_to_replay():
                step.run()

    def reset(self) -> None:
        """Forget the capture, and let go of the tensors it kept alive."""
        if _state.capturing is self:
            raise TapeError("reset: this graph is being captured")
        self._steps.clear()
        self._captured = False

    def pool(self) -> tuple[int, int]:
        """The pool handle given at capture. The tape itself has no pool."""
        return self._pool

    def steps_to_replay(self) -> Sequence[_Step]:
        """What `replay` runs, in order. A subclass may leave steps out to simulate a defect."""
        return self._steps

    def __len__(self) -> int:
        return len(self._steps)

    def __bool__(self) -> bool:
        return True

    def _require_capture(self, verb: str) -> None:
        if not self._captured:
            raise TapeError(f"{verb}: this graph holds no finished capture")

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if _needs_host_value(func, args, kwargs):
            _refuse(str(func))
        if torch.Tag.inplace_view in func.tags or getattr(func, "is_view", False):
            # Shapes and addresses were settled here; there is no data to produce again.
            return func(*args, **kwargs)
        pinned_args, pinned_kwargs = _pin((args, kwargs))
        out = func(*args, **kwargs)
        self._steps.append(_Step(func, pinned_args, pinned_kwargs, tree_leaves(_pin(out))))
        return out
