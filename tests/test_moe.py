"""The DeepEP MoE break: the host's real classes in two real processes, and what stands in its source.

``tests/moe_ranks.py`` runs the checks once for all tests; here is what each must have seen. Where the
host has a break of its own, the subclass is built over that host's class all the same.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_bcg_dsa.seams import examine
from sglang_bcg_dsa.source import root_of
from sglang_bcg_dsa.testing import deep_ep_folder, platform
from sglang_bcg_dsa.testing.models import write_model
from tests.conftest import ROOT
from tests.moe_ranks import BARRIER_S, EXPERTS, LATE_S, STEPS, WORLD


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Every check's values, one a rank."""
    folder = tmp_path_factory.mktemp("moe")
    deep_ep = deep_ep_folder.write_distribution(folder / "deep_ep")
    model = write_model(folder, "mla")
    cpu = folder / "platform"
    platform.write_distribution(cpu)
    path = os.pathsep.join(map(str, (ROOT, deep_ep, cpu)))
    environ = {**os.environ, "PYTHONPATH": path, "SGLANG_PLATFORM": platform.NAME}
    done = subprocess.run(
        [sys.executable, "-m", "tests.moe_ranks", str(folder), str(model)],
        cwd=ROOT, env=environ, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    assert line is not None, done.stderr[-3000:]
    results: dict[str, list[Any]] = json.loads(line.removeprefix("RESULT "))
    assert "start" not in results, results["start"]
    return results


def both(seen: dict[str, list[Any]], check: str) -> list[Any]:
    for rank, value in enumerate(seen[check]):
        assert not (isinstance(value, str) and value.startswith("Traceback")), f"rank {rank}: {value}"
    return seen[check]


def test_replay_equals_eager_across_ranks_bit_for_bit(seen: dict[str, list[Any]]) -> None:
    """Two layers, two inputs: capture communicates nothing (the stand-in refuses it), replay all of it, in NORMAL mode."""
    for value in both(seen, "replay_equals_eager"):
        assert value["equal"] == [True, True]
        assert value["differ"], "both inputs gave the same output: the comparison says nothing"
        assert value["communication while capturing"] == 0
        assert value["at replay"] == {"dispatch": 4, "combine": 4, "low_latency_dispatch": 0}


def test_the_host_s_mode_is_restored(seen: dict[str, list[Any]]) -> None:
    """NORMAL whatever ``is_extend_in_batch`` says; it is what the runner had set, also after a break that raised."""
    for value in both(seen, "host_mode_is_restored"):
        assert value == {"seen": [["done", True]] * 2 + [["refused", True, True]] * 2, "low latency": 0}


def test_the_expert_recorder_counts_at_replay_what_it_counts_eagerly(seen: dict[str, list[Any]]) -> None:
    """The host's own recorder, told the layer at replay; a draft model, which it leaves out, stays out."""
    for value in both(seen, "recorder_counts"):
        assert value["replayed"] == value["eager"]
        assert [any(layer) for layer in value["eager"]] == [False, False, False, True, True]
        assert not any(map(any, value["draft"]))


def test_a_rebalance_of_experts_reaches_captured_graphs(seen: dict[str, list[Any]]) -> None:
    """The host's updater moves weights between the ranks and writes its maps in place: replays follow at once.

    Control: with maps that are replaced instead, the same replay sends tokens to the wrong experts.
    """
    for value in both(seen, "rebalance"):
        assert value == {"moved": True, "as eager": True, "as before": True}
    assert not all(value["as before"] for value in both(seen, "stale_map"))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("unaligned", ("layer 3", "bucket 18 is no multiple of 8", "--cuda-graph-bs-prefill")),
        ("top-k", ("layer 3", "BypassedTopKOutput", "--disable-prefill-cuda-graph")),
        ("overlap", ("layer 3", "single-batch overlap", "--enable-single-batch-overlap")),
        ("lp", ("layer 3", "--ep-dispatch-algorithm lp", "wrong experts", "--enable-eplb")),
        ("elastic", ("layer 3", "elastic expert parallelism", "--elastic-ep-backend")),
    ],
)
def test_what_a_captured_graph_would_get_wrong_is_refused(
    seen: dict[str, list[Any]], case: str, parts: tuple[str, ...]
) -> None:
    """At warm-up, through the layer's forward; the message has the layer, the cause and what to do."""
    for value in both(seen, "refusals"):
        assert value[case].startswith("CaptureError: ")
        assert [part for part in parts if part not in value[case]] == []


def test_what_it_gets_right_is_not_refused(seen: dict[str, list[Any]]) -> None:
    """A bucket that is a multiple of 8 with attention-TP counted in, and rebalancing with a static map."""
    for value in both(seen, "refusals"):
        assert (value["aligned"], value["static"]) == ("not refused", "not refused")


def test_dispatch_in_a_segment_is_refused_and_not_captured(seen: dict[str, list[Any]]) -> None:
    """Two-batch overlap's operator calls the dispatcher past the layer's forward: on a GPU a capture of it spins."""
    for value in both(seen, "calls_outside_a_break"):
        for call, name in (("operator", "dispatch_a"), ("direct", "dispatch")):
            assert value[call].startswith(f"CaptureError: layer 4: the model called {name} ")
            assert "--enable-two-batch-overlap" in value[call]


def test_shared_experts_are_not_forked_across_the_break(seen: dict[str, list[Any]]) -> None:
    """The host's ``forward_deepep``: same sum, alternate stream untouched in a capture and there again afterwards."""
    for value in both(seen, "shared_experts"):
        assert value == {"equal": True, "restored": [True, True], "outside": "forked by wait_stream"}


def test_the_host_finds_the_subclass_by_name_and_by_kind(seen: dict[str, list[Any]]) -> None:
    """compressed-tensors looks its scheme up by class name; DeepGEMM's check and several models ask ``isinstance``."""
    for value in both(seen, "names_and_kinds"):
        assert value == {"scheme": True, "isinstance": True, "ours": True, "mapping": 3 * EXPERTS}


def test_a_rank_that_does_not_come_is_named_by_each_that_waits(seen: dict[str, list[Any]]) -> None:
    """Late or dead, rank 0 or another: the wait ends, at the limit or at once, with the absent rank's number."""
    for rank, value in enumerate(both(seen, "a_rank_that_is_late")):
        for case, (text, seconds) in value.items():
            assert text.startswith(f"CaptureError: rank {rank} waited")
            assert f"rank {case.removeprefix('without ')} did not come" in text
            assert LATE_S * 0.9 <= seconds < LATE_S + 5
    assert [list(value) for value in seen["a_rank_that_is_late"]] == [[f"without {WORLD - 1 - rank}"] for rank in range(WORLD)]
    text, seconds = both(seen, "a_rank_that_dies")[0]
    assert "rank 1 did not come" in text
    assert seconds < BARRIER_S / 2, "a rank that has ended is noticed at once"


# --- the host's models ----------------------------------------------------------------------------


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef]]:
    tree = ast.parse(path.read_text(encoding="utf-8-sig"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for child in node.body:
                if isinstance(child, ast.FunctionDef):
                    yield f"{node.name}.{child.name}", child


def forks_around_experts() -> set[tuple[str, str]]:
    """Functions of the host's models that call experts and use events of streams."""
    models = root_of("sglang") / "srt" / "models"
    return {
        (path.stem, name)
        for path in sorted(models.rglob("*.py"))
        for name, function in functions(path)
        if "experts" in (called := _called(function)) and called & {"record_event", "wait_event"}
    }


def _called(function: ast.FunctionDef) -> set[str]:
    calls = (node.func for node in ast.walk(function) if isinstance(node, ast.Call))
    return {call.attr for call in calls if isinstance(call, ast.Attribute)}


def test_no_model_but_the_wrapped_one_forks_around_its_experts_by_event() -> None:
    """An event recorded in one segment and waited for in another is what CUDA refuses.

    One function of all models does that; it serves DeepSeek-V3.2, GLM-5.x and DSV4, and the plugin
    wraps it. Forks by ``wait_stream`` the host joins where a segment ends. Where the host has a
    break of its own, its models join their streams before it.
    """
    seams = examine()
    forks, wrapped = forks_around_experts(), ("deepseek_v2", seams["moe.shared"].name)
    assert wrapped in forks
    assert "moe.native" in seams or forks == {wrapped}


def test_every_model_of_the_plugin_builds_the_wrapped_moe() -> None:
    """DeepSeek-V3.2, GLM-5.x and DSV4 take ``DeepseekV2MoE`` as it is: no class of the host overrides its method."""
    users, overriding = set(), set()
    for path in sorted((root_of("sglang") / "srt" / "models").rglob("*.py")):
        text = path.read_text(encoding="utf-8-sig")
        if "DeepseekV2MoE(" in text:
            users.add(path.stem)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef) and any("DeepseekV2MoE" in ast.unparse(base) for base in node.bases):
                overriding |= {node.name for child in node.body if getattr(child, "name", "") == "forward_deepep"}
    assert {"deepseek_v2", "deepseek_v4"} <= users
    assert not overriding


def test_votes_over_a_real_group_are_read_alike_and_followed_by_every_rank(seen: dict[str, list[Any]]) -> None:
    """200 random steps over the host's own gather: one verdict, and no rank replays while another runs eagerly."""
    one, other = both(seen, "votes")
    assert len(one) == STEPS
    replayed = 0
    for mine, theirs in zip(one, other, strict=True):
        assert mine[:2] == theirs[:2]
        verdict = mine[0]
        took = {replay for _, _, replay, prefill in (mine, theirs) if prefill}
        assert len(took) <= 1
        if verdict is not None and took:
            assert took == {verdict[0]}
            replayed += verdict[0]
    assert 10 < replayed < STEPS - 10, "both paths were taken"
