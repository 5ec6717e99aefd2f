"""The gloo stand-in for DeepEP, in real processes: what it delivers, and what it refuses."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from hypothesis import example, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from sglang_bcg_dsa.testing import deep_ep_folder, deep_ep_gloo, deep_ep_overrides  # noqa: E402
from sglang_bcg_dsa.testing.tape import TapeGraph  # noqa: E402

HIDDEN, INTERMEDIATE = 8, 12
PATIENCE_S = 30
PACKAGE_ROOT = Path(deep_ep_gloo.__file__).parents[2]


class Routing(NamedTuple):
    """For every rank, for every token, the experts it chose; -1: none."""

    experts_per_rank: int
    chosen: list[list[list[int]]]
    top_k: int
    seed: int = 0

    @property
    def experts(self) -> int:
        return self.experts_per_rank * len(self.chosen)


class Problem(NamedTuple):
    """One rank's tokens, and every expert's weights."""

    x: torch.Tensor
    idx: torch.Tensor
    weights: torch.Tensor
    w13: torch.Tensor
    w2: torch.Tensor


def problem(routing: Routing, rank: int) -> Problem:
    """The same in whichever process it is made."""
    rng = torch.Generator().manual_seed(routing.seed)
    w13 = torch.randn(routing.experts, 2 * INTERMEDIATE, HIDDEN, generator=rng) / HIDDEN**0.5
    w2 = torch.randn(routing.experts, HIDDEN, INTERMEDIATE, generator=rng) / INTERMEDIATE**0.5
    rng.manual_seed(routing.seed + 1 + rank)
    idx = torch.tensor(routing.chosen[rank], dtype=torch.int64).view(-1, routing.top_k)
    x = torch.randn(idx.shape[0], HIDDEN, generator=rng)
    return Problem(x, idx, torch.rand(idx.shape, generator=rng) + 0.1, w13, w2)


def reference(p: Problem) -> torch.Tensor:
    """Token by token, in one process, in double precision."""
    out = torch.zeros(p.x.shape, dtype=torch.float64)
    for token, choice in (p.idx >= 0).nonzero().tolist():
        expert = p.idx[token, choice]
        gate, up = (p.w13[expert].double() @ p.x[token].double()).chunk(2)
        made = p.w2[expert].double() @ (torch.nn.functional.silu(gate) * up)
        out[token] += p.weights[token, choice] * made
    return out.float()


# --- what a rank does ---------------------------------------------------------------------------


def dispatch(buffer: deep_ep_gloo.Buffer, p: Problem, experts: int, alignment: int = 1) -> Any:
    per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(p.idx, experts)
    return buffer.dispatch(
        p.x,
        topk_idx=p.idx,
        topk_weights=p.weights,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
        expert_alignment=alignment,
    )


def _mine(buffer: deep_ep_gloo.Buffer, routing: Routing) -> tuple[Problem, slice]:
    first = buffer.rank * routing.experts_per_rank
    return problem(routing, buffer.rank), slice(first, first + routing.experts_per_rank)


def normal(buffer: deep_ep_gloo.Buffer, routing: Routing) -> torch.Tensor:
    p, own = _mine(buffer, routing)
    rows, idx, weights, _, handle, _ = dispatch(buffer, p, routing.experts)
    made = deep_ep_overrides.normal_experts(rows, idx, weights, p.w13[own], p.w2[own])
    return buffer.combine(made, handle)[0]


def low_latency(buffer: deep_ep_gloo.Buffer, routing: Routing) -> torch.Tensor:
    p, own = _mine(buffer, routing)
    slots, used, handle, _, hook = buffer.low_latency_dispatch(
        p.x, p.idx, 16, routing.experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    made = deep_ep_overrides.low_latency_experts(slots, used, p.w13[own], p.w2[own])
    return buffer.low_latency_combine(made, p.idx, p.weights, handle)[0]


def delivered(buffer: deep_ep_gloo.Buffer, routing: Routing) -> tuple[Any, ...]:
    p, _ = _mine(buffer, routing)
    return dispatch(buffer, p, routing.experts, alignment=4)[:4]


def slots_and_counts(
    buffer: deep_ep_gloo.Buffer, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    p, _ = _mine(buffer, routing)
    return buffer.low_latency_dispatch(p.x, p.idx, 16, routing.experts, use_fp8=False)[:2]


def traffic(buffer: deep_ep_gloo.Buffer, routing: Routing) -> dict[str, int]:
    before = deep_ep_gloo.counters.as_dict()
    normal(buffer, routing)
    return {name: n - before[name] for name, n in deep_ep_gloo.counters.as_dict().items()}


def refused_on_rank_0(buffer: deep_ep_gloo.Buffer, routing: Routing) -> str:
    """Rank 0 alone makes the call: had it communicated, it would wait for the others in vain."""
    if buffer.rank:
        return ""
    deep_ep_gloo.capturing = lambda: True
    try:
        normal(buffer, routing)
    except deep_ep_gloo.CollectiveInCapture as error:
        return str(error)
    finally:
        deep_ep_gloo.capturing = None
    return "not refused"


Act = Callable[[deep_ep_gloo.Buffer, Routing], Any]


def rank_main(rank: int, world: int, rendezvous: str, pipe: Connection) -> None:
    """Do what is asked until killed; an error goes back as text."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=PATIENCE_S / 2),
    )
    buffer = deep_ep_gloo.Buffer(dist.group.WORLD, low_latency_mode=True)
    while True:
        act, routing = pipe.recv()
        try:
            pipe.send((None, act(buffer, routing)))
        except Exception:
            pipe.send((traceback.format_exc(), None))


class Ranks:
    """Processes of one group; calling it makes all of them act and returns what each got."""

    def __init__(self, world: int, rendezvous: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.world = world
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(
                target=rank_main, args=(rank, world, str(rendezvous), there), daemon=True
            )
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)

    def __call__(self, act: Act, routing: Routing) -> list[Any]:
        for pipe in self._pipes:
            pipe.send((act, routing))
        results = []
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(PATIENCE_S), f"rank {rank} of {self.world} does not answer"
            error, result = pipe.recv()
            assert error is None, f"rank {rank} of {self.world}: {error}"
            results.append(result)
        return results

    def close(self) -> None:
        # Killed: they hold nothing, and an orderly exit of torch takes seconds on a busy machine.
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            process.kill()
            process.join()
            process.close()
            pipe.close()


@pytest.fixture(scope="module", params=[2, 3], ids=["2 ranks", "3 ranks"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Ranks]:
    group = Ranks(request.param, tmp_path_factory.mktemp("gloo") / "rendezvous")
    yield group
    group.close()


# --- routings -----------------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> Callable[[int], Routing]:
    """A routing for up to 3 ranks: ranks without tokens, choices of -1, all to one rank."""
    per_rank = draw(st.integers(1, 3))
    top_k = draw(st.integers(1, min(3, per_rank)))
    favourite = draw(st.none() | st.integers(0, 2))
    # Distinct experts; several of the numbers below zero stand for -1.
    token = st.lists(
        st.integers(-top_k, 3 * per_rank - 1), min_size=top_k, max_size=top_k, unique=True
    )
    tokens = draw(st.lists(st.lists(token, max_size=5), min_size=3, max_size=3))
    seed = draw(st.integers(0, 1000))

    def for_world(world: int) -> Routing:
        def place(choice: int) -> int:
            if choice < 0:
                return -1
            if favourite is not None:
                return favourite % world * per_rank + choice % per_rank
            return choice % (world * per_rank)

        def distinct(chosen: list[int]) -> list[int]:
            seen: list[int] = []
            for expert in map(place, chosen):
                seen.append(-1 if expert in seen else expert)
            return seen

        return Routing(
            per_rank, [[distinct(t) for t in rank] for rank in tokens[:world]], top_k, seed
        )

    return for_world


def one_rank_takes_all(world: int) -> Routing:
    return Routing(2, [[[2, 3], [3, 2]] for _ in range(world)], 2)


def only_rank_0_has_tokens(world: int) -> Routing:
    return Routing(2, [[[0, 2], [3, -1], [-1, -1]], *([] for _ in range(world - 1))], 2)


def nothing_at_all(world: int) -> Routing:
    return Routing(1, [[] for _ in range(world)], 1)


some_routings = settings(deadline=None, max_examples=15)


# --- invariants ---------------------------------------------------------------------------------


@some_routings
@given(shape=shapes())
@example(shape=one_rank_takes_all)
@example(shape=only_rank_0_has_tokens)
@example(shape=nothing_at_all)
def test_both_modes_equal_one_process(ranks: Ranks, shape: Callable[[int], Routing]) -> None:
    """Ranks together give what one process gives; in float32, the two modes agree to the bit."""
    routing = shape(ranks.world)
    outputs, others = ranks(normal, routing), ranks(low_latency, routing)
    for rank, (output, other) in enumerate(zip(outputs, others, strict=True)):
        expected = reference(problem(routing, rank))
        torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
        assert torch.equal(output, other)


@some_routings
@given(shape=shapes())
@example(shape=one_rank_takes_all)
@example(shape=only_rank_0_has_tokens)
def test_dispatch_delivers_each_token_once_per_rank(
    ranks: Ranks, shape: Callable[[int], Routing]
) -> None:
    """A rank gets, in source order, the tokens that chose its experts; ids are local, others -1."""
    routing = shape(ranks.world)
    for rank, (rows, idx, weights, per_expert) in enumerate(ranks(delivered, routing)):
        first = rank * routing.experts_per_rank
        want: list[Problem] = []
        for p in (problem(routing, source) for source in range(ranks.world)):
            local = torch.where(
                (p.idx >= first) & (p.idx < first + routing.experts_per_rank), p.idx - first, -1
            )
            here = (local >= 0).any(dim=1)
            kept = p.weights.masked_fill(local < 0, 0)
            want.append(p._replace(x=p.x[here], idx=local[here], weights=kept[here]))
        assert torch.equal(rows, torch.cat([p.x for p in want]))
        assert torch.equal(idx, torch.cat([p.idx for p in want]))
        assert torch.equal(weights, torch.cat([p.weights for p in want]))
        counts = [int((idx == expert).sum()) for expert in range(routing.experts_per_rank)]
        assert per_expert == [-(-count // 4) * 4 for count in counts]


def test_unused_slots_are_nan(ranks: Ranks) -> None:
    """Whoever reads a low-latency slot past an expert's count gets NaN, not a plausible zero."""
    routing = one_rank_takes_all(ranks.world)
    for slots, used in ranks(slots_and_counts, routing):
        for expert, count in enumerate(used.tolist()):
            assert not slots[expert, :count].isnan().any()
            assert slots[expert, count:].isnan().all()


def test_counters_tell_crossing_from_staying(ranks: Ranks) -> None:
    """``rows_sent`` counts rows that left the rank, there and back; its own are only kept."""
    stay = Routing(1, [[[rank]] * 2 for rank in range(ranks.world)], 1)
    cross = Routing(1, [[[(rank + 1) % ranks.world]] * 2 for rank in range(ranks.world)], 1)
    for seen in ranks(traffic, stay):
        assert (seen["rows_sent"], seen["rows_received"], seen["rows_kept"]) == (0, 0, 4)
    for seen in ranks(traffic, cross):
        assert (seen["rows_sent"], seen["rows_received"], seen["rows_kept"]) == (4, 4, 0)
        assert (seen["dispatch"], seen["combine"]) == (1, 1)


def test_a_call_in_a_capture_is_refused_before_it_communicates(ranks: Ranks) -> None:
    """In a capture the caller gets an error at once, without the others; afterwards all is well."""
    routing = one_rank_takes_all(ranks.world)
    refusal, *_ = ranks(refused_on_rank_0, routing)
    assert "dispatch" in refusal and "eager break" in refusal
    torch.testing.assert_close(ranks(normal, routing)[0], reference(problem(routing, 0)))


# --- without other ranks ------------------------------------------------------------------------


@pytest.fixture
def lone_buffer() -> deep_ep_gloo.Buffer:
    """A buffer that must not reach its group."""
    group: Any = SimpleNamespace(rank=lambda: 0, size=lambda: 2)
    return deep_ep_gloo.Buffer(group)


def test_every_rank_coupled_call_is_refused_while_a_tape_records(
    lone_buffer: deep_ep_gloo.Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All four calls raise inside a tape's segment and are counted; outside, none is refused."""
    monkeypatch.setattr(deep_ep_gloo, "capturing", deep_ep_overrides.tape_is_recording)
    monkeypatch.setattr(deep_ep_gloo, "counters", deep_ep_gloo.Counters())
    p = problem(Routing(2, [[[0, 2]], [[1, 3]]], 2), 0)
    per_rank, _, per_expert, in_rank, _ = lone_buffer.get_dispatch_layout(p.idx, 4)
    normal_handle = deep_ep_gloo.NormalHandle(p.idx[:, 0], [1, 0], [1, 0], 1)
    slot_handle = deep_ep_gloo.LowLatencyHandle(p.idx, p.idx, p.idx, [1, 0], [1, 0], p.x.shape)
    calls: list[Callable[[], object]] = [
        lambda: lone_buffer.dispatch(
            p.x,
            topk_idx=p.idx,
            topk_weights=p.weights,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
        ),
        lambda: lone_buffer.combine(p.x, normal_handle),
        lambda: lone_buffer.low_latency_dispatch(p.x, p.idx, 16, 4, use_fp8=False),
        lambda: lone_buffer.low_latency_combine(p.x, p.idx, p.weights, slot_handle),
    ]
    assert not deep_ep_overrides.tape_is_recording()
    tape = TapeGraph()
    tape.capture_begin()
    try:
        for call in calls:
            with pytest.raises(deep_ep_gloo.CollectiveInCapture):
                call()
    finally:
        tape.capture_end()
    assert not deep_ep_overrides.tape_is_recording()
    assert deep_ep_gloo.counters == deep_ep_gloo.Counters(refused_in_capture=4)


def test_what_deepep_would_not_take_is_refused(lone_buffer: deep_ep_gloo.Buffer) -> None:
    """Rows that are no whole vectors or not contiguous, FP8 payloads, unknown experts raise."""
    idx = torch.zeros(4, 1, dtype=torch.int64)

    def send(x: Any, idx: torch.Tensor = idx, use_fp8: bool = False) -> None:
        lone_buffer.low_latency_dispatch(x, idx, 16, 4, use_fp8=use_fp8)

    with pytest.raises(ValueError, match="multiple of 16 bytes"):
        send(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="contiguous"):
        send(torch.zeros(8, 4).t())
    with pytest.raises(TypeError, match="FP8"):
        send((torch.zeros(4, 8), torch.zeros(4, 1)))
    with pytest.raises(NotImplementedError, match="--deepep-dispatcher-output-dtype bf16"):
        send(torch.zeros(4, 8), use_fp8=True)
    with pytest.raises(ValueError, match=r"outside -1\.\.3"):
        send(torch.zeros(4, 8), idx + 4)
    with pytest.raises(ValueError, match="exceed"):
        send(torch.zeros(17, 8), torch.zeros(17, 1, dtype=torch.int64))


def test_the_stand_in_is_deep_ep_only_for_those_who_ask(tmp_path: Path) -> None:
    """``import deep_ep`` gives the stand-in with the written folder on the path, never without."""
    folder = deep_ep_folder.write_distribution(tmp_path / "dist")
    assert [p.relative_to(tmp_path) for p in tmp_path.rglob("*.py")] == [
        Path("dist/deep_ep/__init__.py")
    ]
    code = "import deep_ep; print(deep_ep.Buffer.__module__)"

    def imported(*path: Path) -> subprocess.CompletedProcess[str]:
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, path)),
            "CUDA_VISIBLE_DEVICES": "",
        }
        return subprocess.run(
            [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=60
        )

    assert imported(folder, PACKAGE_ROOT).stdout.strip() == deep_ep_gloo.__name__
    assert deep_ep_gloo.__name__ not in imported(PACKAGE_ROOT).stdout
