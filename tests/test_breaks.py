"""Breaks on the host's real capture engine, on the tape: order, ownership, stubs, barriers, failures."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph import (
    BreakableCUDAGraph,
    BreakableCUDAGraphCapture,
    break_graph,
    eager_on_graph,
)

from sglang_bcg_dsa.breaks import Break, replaying
from sglang_bcg_dsa.engine import current_capture
from sglang_bcg_dsa.errors import CaptureError
from sglang_bcg_dsa.testing import TapeGraph


@pytest.fixture(autouse=True)
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's engine runs unchanged; only torch's graph and stream are stood in for."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", TapeGraph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: torch.cpu.current_stream())


@contextmanager
def capturing() -> Iterator[Any]:
    graph = BreakableCUDAGraph()
    with BreakableCUDAGraphCapture(graph):
        yield graph


def make(body: Callable[..., None], **kwargs: Any) -> Break:
    return Break(body, current_capture=current_capture, **kwargs)


def add(output: torch.Tensor, x: torch.Tensor, scale: float = 1.0) -> None:
    output.copy_(x * scale + 1)


def test_outside_a_capture_a_break_is_its_body() -> None:
    """Eager forwards pay nothing and see the same result."""
    out = torch.zeros(2)
    make(add)(out, torch.ones(2), scale=3.0)
    assert out.tolist() == [4.0, 4.0]


def test_segments_and_breaks_alternate_and_replay_reads_fresh_values() -> None:
    """Segment, break, segment: each replay runs the body on what the segment before it wrote."""
    x = torch.ones(2)
    brk = make(add)
    with capturing() as graph:
        hidden = x * 10
        first = torch.empty_like(hidden)
        brk(first, hidden)
        middle = first * 2
        second = torch.empty_like(hidden)
        brk(second, middle, scale=0.5)
        result = second + 100
    assert len(graph._segments) == 3
    assert len(graph._break_fns) == 2
    for value in (1.0, 2.0, -3.0):
        x.fill_(value)
        graph.replay()
        assert result.tolist() == [(((value * 10) + 1) * 2 * 0.5 + 1) + 100] * 2


def test_a_break_that_is_skipped_is_seen() -> None:
    """The comparison above can fail: without its breaks the same graph gives stale numbers."""
    x = torch.ones(2)
    brk = make(add)
    with capturing() as graph:
        out = torch.empty_like(x)
        brk(out, x * 10)
        result = out + 0
    x.fill_(2.0)
    graph.replay()
    assert result.tolist() == [21.0, 21.0]
    graph._break_fns.clear()
    x.fill_(3.0)
    graph.replay()
    assert result.tolist() != [31.0, 31.0]


def test_the_stub_stands_in_at_capture_only() -> None:
    """No rank-coupled work while capturing; warm-up and replay do it."""
    calls: list[str] = []

    def body(output: torch.Tensor, x: torch.Tensor) -> None:
        calls.append("body")
        output.copy_(x)

    def stub(output: torch.Tensor, x: torch.Tensor) -> None:
        calls.append("stub")
        output.zero_()

    brk = make(body, stub=stub)
    x, out = torch.ones(2), torch.empty(2)
    brk(out, x)
    with capturing() as graph:
        out = torch.empty_like(x)
        brk(out, x)
        result = out * 2
    graph.replay()
    assert calls == ["body", "stub", "body"]
    assert result.tolist() == [2.0, 2.0]


def test_ranks_meet_after_the_segment_is_torn_down_and_before_the_break() -> None:
    """Ending a segment takes a different time on each rank; what follows is coupled (S#31987)."""
    order: list[str] = []

    class Logged:
        def end_segment(self) -> None:
            order.append("end")

        def begin_segment(self) -> None:
            order.append("begin")

        def add_break(self, run: Callable[[], None]) -> None:
            order.append("add")

    brk = Break(
        lambda output: order.append("body"),
        stub=lambda output: order.append("stub"),
        barrier=lambda: order.append("barrier"),
        current_capture=Logged,
    )
    brk(torch.empty(1))
    assert order == ["end", "barrier", "stub", "add", "begin"]


def test_there_is_no_barrier_at_warm_up_and_replay() -> None:
    """At replay every rank is in lockstep already; a barrier a layer would cost the gain."""
    met: list[int] = []
    brk = make(add, barrier=lambda: met.append(1))
    x, out = torch.ones(1), torch.empty(1)
    brk(out, x)
    assert not met
    with capturing() as graph:
        brk(out, x)
    assert len(met) == 1
    graph.replay()
    assert len(met) == 1


def test_a_returned_value_is_refused_at_capture() -> None:
    """A returned tensor's address would be baked into the next segment, and only the first one's."""
    brk = make(lambda output: output * 2)
    with pytest.raises(CaptureError, match="returned a Tensor; expected None"), capturing():
        brk(torch.ones(1))


def test_a_failing_break_shows_its_own_error() -> None:
    """The host closes a capture by ending a segment; a half-open one would hide the error."""

    def broken(output: torch.Tensor) -> None:
        raise ZeroDivisionError("the body's own")

    with pytest.raises(ZeroDivisionError, match="the body's own"), capturing():
        make(broken)(torch.ones(1))
    assert current_capture() is None


def test_a_failing_barrier_shows_its_own_error() -> None:
    """A rank that does not come ends the capture with what the barrier says."""

    def nobody_came() -> None:
        raise RuntimeError("rank 3 did not reach the barrier")

    with pytest.raises(RuntimeError, match="rank 3 did not reach"), capturing():
        make(add, barrier=nobody_came)(torch.empty(1), torch.ones(1))


def test_a_break_inside_a_break_runs_inline() -> None:
    """Only the outer call splits; the inner one is part of its eager body, at capture and at replay."""
    inner = make(add)

    def body(output: torch.Tensor, x: torch.Tensor) -> None:
        inner(output, x)
        output.mul_(10)

    x = torch.ones(1)
    with capturing() as graph:
        out = torch.empty(1)
        make(body)(out, x)
        result = out + 0
    assert len(graph._segments) == 2
    x.fill_(4.0)
    graph.replay()
    assert result.tolist() == [50.0]


def test_a_break_inside_the_host_s_break_runs_inline() -> None:
    """No segment is open there, so there is none to split; the whole is one eager call, at replay too."""
    x, out = torch.ones(1), torch.empty(1)
    seen: list[bool] = []

    @eager_on_graph(enable=True)
    def host_break() -> None:
        seen.append(current_capture() is None)
        make(add)(out, x)

    with capturing() as graph:
        seen.append(current_capture() is not None)
        host_break()
        result = out * 2
    assert seen == [True, True]
    assert len(graph._segments) == 2
    x.fill_(4.0)
    graph.replay()
    assert result.tolist() == [10.0]


def test_a_break_holds_staging_and_nothing_of_the_pool() -> None:
    """S#37606: inputs of a break may be recycled once captured; what the break reads at replay may not."""
    brk = make(add)
    with capturing() as graph:
        temporary = torch.ones(1000) * 2
        out = torch.empty(1000)
        brk(out, temporary)
        result = out + 0
    gone = weakref.ref(temporary), weakref.ref(out)
    del temporary, out
    staged = brk._staging.like(0, torch.empty(1000))
    assert brk.staged_bytes == 2 * 4000
    gc.collect()
    # The tape itself keeps what it recorded; the break does not.
    graph._segments[0].reset()
    graph._segments[1].reset()
    gc.collect()
    assert [ref() for ref in gone] == [None, None]
    staged.fill_(5.0)
    graph._break_fns[0]()
    assert brk._staging.like("output", torch.empty(1000)).tolist() == [6.0] * 1000
    assert result.shape == (1000,)


def test_all_layers_and_buckets_share_one_staging_set() -> None:
    """Memory does not grow with layers or buckets: 3 layers and 3 buckets cost one set of the largest."""
    brk = make(add)
    for rows in (256, 64, 8):
        with capturing():
            x = torch.ones(rows, 4)
            for _ in range(3):
                out = torch.empty_like(x)
                brk(out, x)
                x = out
    assert brk.staged_bytes == 2 * 256 * 4 * 4


def test_tensors_inside_containers_are_refused() -> None:
    """A list of tensors cannot be staged; refused at capture instead of read from recycled memory."""

    def body(output: torch.Tensor, xs: list[torch.Tensor]) -> None: ...

    with pytest.raises(CaptureError, match="argument 0 of break .*body is a list with tensors in it"), capturing():
        make(body)(torch.empty(1), [torch.ones(1)])


def test_strided_inputs_arrive_as_they_are() -> None:
    """A transposed input is staged by value, whatever its layout."""
    x = torch.arange(6.0).reshape(2, 3)
    with capturing() as graph:
        out = torch.empty(3, 2)
        make(add)(out, x.t())
        result = out + 0
    x.add_(10)
    graph.replay()
    assert torch.equal(result, x.t() + 1)


def test_a_body_knows_that_it_is_replayed() -> None:
    """State that the host keeps in Python around the call is there at warm-up and not at replay."""
    seen: list[bool] = []
    brk = make(lambda output: seen.append(replaying()), stub=lambda output: None)
    brk(torch.empty(1))
    with capturing() as graph:
        brk(torch.empty(1))
    graph.replay()
    assert seen == [False, True]


def test_a_later_bucket_does_not_disturb_an_earlier_one() -> None:
    """Capture 256 rows, then 64, drop every reference, churn memory, replay 256: as eager (report 5.9)."""
    weight = torch.arange(8.0)

    def cumulate(output: torch.Tensor, x: torch.Tensor) -> None:
        output.copy_(x.cumsum(0))

    brk = make(cumulate)

    def forward(x: torch.Tensor) -> torch.Tensor:
        hidden = x * weight
        out = torch.empty_like(hidden)
        brk(out, hidden)
        return out + hidden

    graphs = {}
    for rows in (256, 64):
        x = torch.ones(rows, 8)
        with capturing() as graph:
            result = forward(x)
        graphs[rows] = (graph, x, result)
    gc.collect()
    for round_ in range(5):
        junk = [torch.rand(rows, 8) for rows in (256, 64) for _ in range(20)]
        for rows in (256, 64):
            graph, x, result = graphs[rows]
            x.copy_(torch.rand(rows, 8, generator=torch.Generator().manual_seed(round_)))
            graph.replay()
            assert torch.equal(result, forward(x))
        del junk


def test_the_host_s_own_breaks_and_ours_share_one_capture() -> None:
    """Attention breaks of the host and MoE breaks of ours interleave in one graph."""
    x = torch.ones(1)
    with capturing() as graph:
        y = x + 1
        break_graph()
        out = torch.empty(1)
        make(add)(out, y)
        result = out * 2
    x.fill_(5.0)
    graph.replay()
    assert result.tolist() == [14.0]
    assert len(graph._segments) == 3
