"""Benchmark: what is timed, what is refused, and that a failed run keeps what it measured."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_bcg_dsa import cli, show
from sglang_bcg_dsa.bench import BenchFailed, Case, Options, _arriving
from sglang_bcg_dsa.bench_rank import DONE
from tests.conftest import ROOT, Run


@pytest.mark.parametrize(
    ("kwargs", "says"),
    [
        ({"tokens": ()}, "--tokens"),
        ({"tokens": (0, 4)}, "at least 1"),
        ({"check": (Case((3, 0)),)}, "request lengths"),
        ({"check": (Case((3,), -1),)}, "request lengths"),
        ({"repeats": 1}, "for a median"),
    ],
)
def test_bad_options_are_refused_by_name(kwargs: dict[str, Any], says: str) -> None:
    """Bad input gets one clear error."""
    with pytest.raises(ValueError, match=says):
        Options(**kwargs)


def test_a_rank_that_ends_early_loses_no_measurement() -> None:
    """Invariant: what was measured before a failure is reported with it."""
    queue: Any = Queue()
    queue.put(("ladder", [64]))
    ranks = [SimpleNamespace(exitcode=None), SimpleNamespace(exitcode=1)]
    measured: dict[str, Any] = {}
    with pytest.raises(BenchFailed, match=r"rank 1 \(status 1\)") as failed:
        measured.update(_arriving(ranks, queue, 60.0, measured))
    assert failed.value.measured == {"ladder": [64]}


def test_measurements_end_with_the_last() -> None:
    """Invariant: a rank that ended well after its last measurement is no failure."""
    queue: Any = Queue()
    for item in (("ladder", [64]), (DONE, None)):
        queue.put(item)
    assert dict(_arriving([SimpleNamespace(exitcode=0)], queue, 60.0, {})) == {"ladder": [64]}


def test_parts_of_a_replay_are_named_by_what_runs_in_them(fresh: Run) -> None:
    """Invariant: our breaks and the host's are told apart, and a timed replay runs the host's own loop."""
    done = fresh(textwrap.dedent("""
        import torch
        from sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph import breakable_cuda_graph as bcg
        from sglang_bcg_dsa import engine
        from sglang_bcg_dsa.breaks import Break

        class Event:
            def __init__(self, enable_timing):
                pass
            def record(self):
                pass
            def elapsed_time(self, other):
                return 2.0

        torch.cuda.Event, torch.cuda.synchronize = Event, lambda: None
        torch.cuda.current_stream = lambda: torch.cpu.current_stream()

        class Selection:
            def __call__(self, output):
                output.add_(1)

        def host_break():
            order.append("host")

        order, x = [], torch.zeros(2)
        graph = bcg.BreakableCUDAGraph()

        class Capture:
            end_segment = begin_segment = staticmethod(lambda: None)
            add_break = staticmethod(graph._break_fns.append)

        Break(Selection(), current_capture=Capture)(x)

        class Captured:
            cuda_graph, _barrier_fn = graph, None
            _end_current_segment = _begin_new_segment = staticmethod(lambda: None)

        token = bcg._current_capture_var.set(Captured())
        bcg.eager_on_graph(True)(host_break)()
        bcg._current_capture_var.reset(token)

        class Segment:
            def replay(self):
                order.append("segment")

        graph._segments += [Segment() for _ in range(3)]
        order.clear()
        times = engine.BreakTimes()
        with times:
            times.on_replay(bcg.BreakableCUDAGraph.replay, graph)
        assert order == ["segment", "segment", "host", "segment"], order
        parts = times.parts(1)
        assert {name: part["calls"] for name, part in parts.items()} == {"segments": 3, "Selection": 1, "host_break": 1}, parts
        assert parts["segments"]["gpu_ms"] == 6.0
        times.on_replay(lambda it: order.append(it), graph)
        assert order[-1] is graph
    """))
    assert done.returncode == 0, done.stderr


def test_the_tables_take_whatever_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """Invariant: a run without graphs, and one that failed early, are shown."""
    environment = {"cards": "1", "card": "H200", "driver": "1", "cuda": "13", "plugin": "0", "date": "2026-01-01"}
    spread = {"median": 1.0, "p10": 0.5, "p90": 2.0, "n": 4}
    clocks = {"gpu_ms": spread, "wall_ms": spread}
    show.bench({"environment": environment})
    show.bench(json.loads(json.dumps({
        "environment": environment,
        "check": [{"lengths": [3, 4], "spread": 0.0, "eager_tokens_differ": 0, "scale": 1.0}],
        "time": [{"tokens": 64, "eager": {**clocks, "peak_bytes": 3 << 28}}, {"tokens": 65, "eager": clocks}],
        "capture": None,
    })))  # fmt: skip
    text = capsys.readouterr().out
    assert "3+4" in text
    assert "1.00 (0.50 .. 2.00)" in text
    assert ["64", "0.750", "-"] in [line.split() for line in text.splitlines()], "device memory of a forward"


@pytest.mark.parametrize("name", [path.name for path in sorted((ROOT / "bench").glob("*.json"))])
def test_kept_measurements_can_be_shown_without_a_gpu(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every file in ``bench/`` names card, driver, versions and date, and is shown as it was when measured."""
    assert cli.main(["bench", "--show", str(ROOT / "bench" / name)]) == 0
    text = capsys.readouterr().out
    measured = json.loads((ROOT / "bench" / name).read_text())
    for field in ("card", "driver", "cuda", "sglang", "date"):
        assert measured["environment"][field] in text
    for row in measured["time"]:
        assert f"{row['ratio']['gpu_ms']:.2f}" in text


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["bench"], "no arguments for SGLang"),
        (["compare", "--"], "no arguments for SGLang"),
        (["bench", "--tokens", "a,b", "--", "--model-path", "x"], "--tokens a,b: expected whole numbers"),
        (["bench", "--check", "3+", "--", "--model-path", "x"], "--check 3+: expected whole numbers"),
        (["bench", "--check", "/3", "--", "--model-path", "x"], "--check : expected whole numbers"),
        (["bench", "--check", "8/", "--", "--model-path", "x"], "--check : expected whole numbers"),
        (["bench", "--profile", "x", "--", "--model-path", "x"], "--profile x"),
        (["bench", "--save", "/none/x.json", "--", "--model-path", "x"], "no such folder"),
        (["bench", "--show", "/none.json"], "no file of bench --save"),
        (["bench", "--", "--model-path", "x", "--nope"], "SGLang's arguments: unrecognized arguments: --nope"),
        (["compare", "--", "--model-path", "x", "--tp", "two"], "SGLang's arguments: argument"),
        (["compare", "--requests", "0", "--", "--model-path", "x"], "--requests 0"),
    ],
)
def test_bad_command_lines_get_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What, where and what to do, before anything starts; exit status 2."""
    assert cli.main(argv) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    line = [line for line in captured.err.splitlines() if line.startswith("sglang-bcg-dsa ")]
    assert len(line) == 1
    assert says in line[0]


@pytest.mark.parametrize("command", ["bench", "compare"])
def test_a_forgotten_separator_is_pointed_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's arguments without ``--`` are refused with the hint."""
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--model-path", "x"])
    assert stopped.value.code == cli.BAD_INPUT
    assert "come after --" in capsys.readouterr().err


def test_a_file_of_something_else_is_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Valid JSON that ``bench`` did not write is bad input, not a traceback."""
    for text in ("{}", "[1]", "no"):
        (tmp_path / "f.json").write_text(text)
        assert cli.main(["bench", "--show", str(tmp_path / "f.json")]) == cli.BAD_INPUT
        assert "is no file of bench --save" in capsys.readouterr().err
