"""The tape keeps a CUDA graph's contract: Python once, fixed addresses, no value frozen unseen."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_bcg_dsa.testing import (  # noqa: E402
    HostReadDuringCapture,
    TapeError,
    TapeGraph,
    allow_host_reads,
)


@contextmanager
def captured(graph: TapeGraph) -> Iterator[None]:
    """What the host does around a segment."""
    graph.capture_begin(pool=(0, 0), capture_error_mode="global")
    try:
        yield
    finally:
        graph.capture_end()


def test_replay_reads_the_captured_inputs_and_writes_the_captured_outputs() -> None:
    """Invariant: addresses are fixed, contents are live."""
    x, w, graph = torch.ones(4), torch.eye(4) * 2, TapeGraph()
    with captured(graph):
        y = x @ w + 1
    address = y.data_ptr()
    x.fill_(5)
    assert y.tolist() == [3.0] * 4
    graph.replay()
    assert (y.tolist(), y.data_ptr()) == ([11.0] * 4, address)


def test_python_runs_at_capture_only() -> None:
    """Invariant: Python between begin and end is not run again, so what it decides is frozen."""
    runs, x, graph = [], torch.zeros(1), TapeGraph()
    with captured(graph):
        runs.append(1)
        y = x + len(runs)
    runs.append(1)
    graph.replay()
    assert (len(runs), y.item()) == (2, 1.0)


def test_a_rebound_input_is_not_seen() -> None:
    """Invariant: metadata replaced instead of refreshed in place gives the stale result."""
    metadata, graph = {"x": torch.ones(2)}, TapeGraph()
    with captured(graph):
        y = metadata["x"] * 10
    metadata["x"] = torch.full((2,), 7.0)
    graph.replay()
    assert y.tolist() == [10.0, 10.0]


def test_a_break_that_misses_its_buffer_is_visible() -> None:
    """Invariant: the segment after a break reads the captured buffer, not the fresh result."""
    x, first, second = torch.ones(3), TapeGraph(), TapeGraph()
    with captured(first):
        h = x * 2
    buffer = h + 1  # the break, run eagerly
    with captured(second):
        y = buffer * 10
    x.fill_(4)
    first.replay()
    fresh = h + 1
    second.replay()
    assert y.tolist() == [30.0] * 3
    buffer.copy_(fresh)
    second.replay()
    assert y.tolist() == [90.0] * 3


def test_views_and_in_place_writes_keep_their_place() -> None:
    """Invariant: aliases made during capture, also of changed shape, alias at replay."""
    x, graph = torch.arange(6.0), TapeGraph()
    with captured(graph):
        h = x.clone()
        part = h.view(2, 3)[1]
        h.add_(1)
        part.mul_(2)
        row = h[:3].unsqueeze(0)
        row.squeeze_(0)
        row.zero_()
    x.fill_(1)
    graph.replay()
    assert h.tolist() == [0, 0, 0, 4, 4, 4]


def test_later_changes_of_shape_do_not_move_the_record() -> None:
    """Invariant: an in-place change of shape after a step leaves that step alone."""
    x, graph = torch.ones(1, 3), TapeGraph()
    with captured(graph):
        h = x + 1
        y = h * 2
        h.squeeze_(0)
        z = h + 1
    x.fill_(2)
    graph.replay()
    assert (y.tolist(), z.tolist()) == ([[6.0] * 3], [4.0] * 3)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_module_replays_like_it_runs(mode: Callable[[], Any]) -> None:
    """Invariant: replay equals eager bit for bit, in the modes the host captures in."""
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 8)
    ).eval()
    with mode():
        x, graph = torch.randn(5, 8), TapeGraph()
        with captured(graph):
            out = module(x)
        x.copy_(torch.randn(5, 8))
        graph.replay()
        assert torch.equal(out, module(x))


CHAIN = ["mul", "add_", "view", "cat", "where", "index", "softmax"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(CHAIN), max_size=8))
def test_any_chain_replays_like_it_runs(names: list[str]) -> None:
    """Invariant: for chains of fresh, in-place and aliasing operations, replay equals eager."""
    steps: dict[str, Callable[[Any], Any]] = {
        "mul": lambda t: t * 1.5,
        "add_": lambda t: t.add_(1),
        "view": lambda t: t.view(-1).view(4, 4).t(),
        "cat": lambda t: torch.cat([t[2:], t[:2]]),
        "where": lambda t: torch.where(t > 0, t, -t),
        "index": lambda t: t[torch.tensor([3, 0, 2, 1])],
        "softmax": lambda t: t.softmax(-1),
    }

    def run(x: Any) -> Any:
        t = x * 1
        for name in names:
            t = steps[name](t if name != "view" else t.contiguous())
        return t

    x, graph = torch.linspace(-2, 2, 16).view(4, 4), TapeGraph()
    with captured(graph):
        out = run(x)
    x.copy_(torch.linspace(3, -3, 16).view(4, 4))
    graph.replay()
    assert torch.equal(out, run(x))


READS: dict[str, Callable[[Any], object]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy(),
    "cpu numpy": lambda t: t.cpu().numpy(),
    "bool": lambda t: bool(t.sum()),
    "if": lambda t: 1 if t.sum() > 0 else 0,
    "int": lambda t: int(t.sum()),
    "float": lambda t: float(t.sum()),
    "index": lambda t: list(range(9))[t.sum().long()],
    "slice": lambda t: t[: t.sum().long()],
    "contains": lambda t: 3 in t,
    "equal": lambda t: torch.equal(t, t),
    "nonzero": lambda t: t.nonzero(),
    "masked_select": lambda t: t.masked_select(t > 0),
    "mask": lambda t: t[t > 0],
    "mask assignment": lambda t: t.index_put_((t > 0,), torch.ones(3)),
    "unique": lambda t: t.unique(),
    "repeat_interleave": lambda t: t.repeat_interleave(t.long()),
    "bincount": lambda t: torch.bincount(t.long()),
    "tensor_split": lambda t: torch.tensor_split(t, torch.tensor([1])),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_host_reads_are_refused(read: Callable[[Any], object]) -> None:
    """Invariant: during capture no tensor's value reaches Python or a shape; elsewhere any may."""
    t = torch.tensor([1.0, 2.0, 0.0])
    if read is not READS["mask assignment"]:
        read(t.clone())
    with captured(TapeGraph()), pytest.raises(HostReadDuringCapture):
        read(t)


def test_the_refusal_says_what_where_and_what_to_do() -> None:
    """Invariant: the error names the call and the user's own line, not one of torch or the tape."""
    t = torch.ones(2)
    with captured(TapeGraph()), pytest.raises(HostReadDuringCapture) as refused:
        t.tolist()
    assert refused.value.what == "Tensor.tolist()"
    assert refused.value.where.startswith(f"{__file__}:")
    assert all(words in str(refused.value) for words in ("t.tolist()", "frozen", "break"))


def test_a_capture_goes_on_after_a_refusal() -> None:
    """Invariant: a refused read leaves neither the capture nor the thread in a broken state."""
    x, graph = torch.ones(2), TapeGraph()
    with captured(graph):
        with pytest.raises(HostReadDuringCapture):
            x.tolist()
        y = x + 1
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [3.0, 3.0]


def test_fixed_shape_forms_are_allowed() -> None:
    """Invariant: what a GPU can capture is not refused: index by integers, fill under a mask."""
    t, graph = torch.tensor([1.0, -2.0, 3.0]), TapeGraph()
    with captured(graph):
        picked = t[torch.tensor([2, 0])]
        filled = t.clone()
        filled[t < 0] = 0.0
        repeated = t.repeat_interleave(torch.tensor([1, 1, 1]), output_size=3)
    t.copy_(torch.tensor([-4.0, 5.0, 6.0]))
    graph.replay()
    assert picked.tolist() == [6.0, -4.0]
    assert filled.tolist() == [0.0, 5.0, 6.0]
    assert repeated.tolist() == [-4.0, 5.0, 6.0]


def test_allowed_reads_are_frozen() -> None:
    """Invariant: the explicit permission lifts the refusal inside only, and freezes the value."""
    n, x, graph = torch.tensor(3.0), torch.ones(1), TapeGraph()
    with captured(graph):
        with allow_host_reads("the count is fixed for the life of this test"):
            y = x * n.item()
        with pytest.raises(HostReadDuringCapture):
            n.item()
    n.fill_(5)
    graph.replay()
    assert y.item() == 3.0
    with pytest.raises(ValueError, match="reason"), allow_host_reads(" "):
        pass


def test_other_threads_are_left_alone() -> None:
    """Invariant: a capture watches its own thread only, and each thread may have one."""
    t, seen = torch.ones(2), []

    def elsewhere() -> None:
        seen.append((t.tolist(), (t * 2).sum().item()))
        with captured(own := TapeGraph()):
            t + 1
            with pytest.raises(HostReadDuringCapture):
                t.tolist()
        seen.append(len(own))

    with captured(graph := TapeGraph()), allow_host_reads("only this thread's reads are allowed"):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert (seen, len(graph)) == ([([1.0, 1.0], 4.0), 1], 0)


def test_views_cost_nothing_at_replay() -> None:
    """Invariant: what only makes an alias or changes a shape is not a step."""
    x, graph = torch.ones(1, 4), TapeGraph()
    with captured(graph):
        x.view(2, 2).t()[0].unsqueeze(0).squeeze_(0)
    assert len(graph) == 0


def test_nothing_is_left_behind_after_capture() -> None:
    """Invariant: after capture_end, reads work and operations are no longer recorded."""
    x, graph = torch.ones(2), TapeGraph()
    with captured(graph):
        x.add_(1)
    steps = len(graph)
    x.mul_(3)
    assert (len(graph), steps, x.tolist()) == (1, 1, [6.0, 6.0])


def test_misuse_is_refused() -> None:
    """Invariant: nesting, and replay without or during a capture, are refused as by CUDA."""
    graph, other = TapeGraph(keep_graph=True), TapeGraph()
    for verb in (graph.replay, graph.instantiate, graph.capture_end):
        with pytest.raises(TapeError):
            verb()
    with captured(other):
        torch.ones(1)
    with captured(graph):
        for verb in (graph.capture_begin, other.capture_begin, other.replay, graph.reset):
            with pytest.raises(TapeError):
                verb()
    graph.instantiate()
    graph.replay()
    with pytest.raises(TapeError, match="reset"):
        graph.capture_begin()
    graph.reset()
    with pytest.raises(TapeError):
        graph.replay()


def test_reset_lets_go_of_the_tensors() -> None:
    """Invariant: a tape keeps its tensors alive until reset, as a graph's pool does."""
    graph = TapeGraph()
    with captured(graph):
        y = torch.ones(3) + 1
    storage = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
    del y
    assert not storage.expired()
    graph.reset()
    assert storage.expired()


def test_an_operator_in_python_runs_again() -> None:
    """Invariant: a custom operator is one opaque step, called again at replay."""
    calls: list[int] = []

    @torch.library.custom_op("bcg_test::twice", mutates_args=("out",))
    def twice(x: torch.Tensor, out: torch.Tensor) -> None:
        calls.append(1)
        out.copy_(x * 2)

    x, out, graph = torch.ones(2), torch.zeros(2), TapeGraph()
    with captured(graph):
        twice(x, out)
    x.fill_(4)
    graph.replay()
    assert (len(calls), len(graph), out.tolist()) == (2, 1, [8.0, 8.0])
