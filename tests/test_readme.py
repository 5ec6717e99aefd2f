"""The README says what is true: commands, reasons, settings, the example."""

from __future__ import annotations

import json
import re
import tomllib
from typing import Any

import msgspec
import pytest

from sglang_bcg_dsa import cli
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.features import WORKING_RELEASES
from sglang_bcg_dsa.hooks.manager import add, build_manager
from sglang_bcg_dsa.metrics import COUNTERS, GAUGES, PREFIX
from sglang_bcg_dsa.predicate import BatchFacts
from sglang_bcg_dsa.reasons import NAMES, cure, meaning
from sglang_bcg_dsa.records import BatchView
from sglang_bcg_dsa.rules import RULES
from tests.conftest import PACKAGE, ROOT

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_every_reason_is_explained() -> None:
    """An operator who reads a reason in the log finds it here, in the same words as in the program."""
    for name in NAMES:
        assert f"| `{name}` | {meaning(name)} | {cure(name)} |" in README


def test_every_metric_and_alert_is_explained() -> None:
    """Names in the tables are those that exist."""
    assert set(re.findall(r"`(sglang:bcg_dsa_\w+)`", README)) == {PREFIX + name for name in COUNTERS | GAUGES}
    rules = (PACKAGE / "ops/bcg-dsa-rules.yml").read_text()
    assert re.findall(r"\| `(BcgDsa\w+)` \|", README) == re.findall(r"alert: (\w+)", rules)


def test_every_rule_is_explained() -> None:
    """Name, cause, why and cure stand here in the same words as in the message."""
    for rule in RULES:
        assert f"| `{rule.name}` | {rule.cause} | {rule.why} | {rule.cure} |" in README
    table = README.partition("### Rules")[2].partition("\n\nFrom 0.5.17")[0]
    assert table.count("\n| `") == len(RULES), "no rule that is gone"


def test_the_settings_shown_are_the_defaults() -> None:
    """Copied into a file, the example changes nothing."""
    (text,) = blocks("toml")
    assert msgspec.convert(tomllib.loads(text), Config) == Config()


def test_the_example_plugin_works() -> None:
    """What a plugin author copies registers and vetoes."""
    code = next(b for b in blocks("python") if "bcg_replay_veto" in b)
    scope: dict[str, Any] = {"__name__": "batch_guard"}
    exec(code, scope)
    module = type("M", (), {k: staticmethod(v) for k, v in scope.items() if k.startswith("bcg_")})
    manager = build_manager()
    add(manager, "batch_guard", module)
    for requests, wanted in ((64, []), (65, ["too_many_requests"])):
        view = BatchView(BatchFacts(requests, 100), 128, None)
        assert manager.hook.bcg_replay_veto(batch=view) == wanted


def test_releases_named_here_are_those_named_in_refusals() -> None:
    """One list of releases."""
    for release in WORKING_RELEASES.split(", "):
        assert release in README


@pytest.mark.parametrize("command", ["doctor", "rehearse", "report http"])
def test_commands_have_the_options_shown(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each option in the README is an option of the command."""
    (line,) = [s for s in README.splitlines() if s.startswith(f"sglang-bcg-dsa {command}")]
    with pytest.raises(SystemExit):
        cli.main([command.split()[0], "--help"])
    shown = capsys.readouterr().out
    for option in re.findall(r"--[a-z-]+", line):
        assert option in shown


def test_json_shown_is_json() -> None:
    """The sample of /server_info parses."""
    for block in blocks("json"):
        msgspec.json.decode(block)


def test_the_table_of_speeds_is_what_was_measured() -> None:
    """Every number of the speed table comes from the files in ``bench/``."""
    files = {"plugin": "h200x2-sglang-0.5.16-plugin.json", "own": "h200x2-sglang-0.5.17-own.json"}
    measured = {name: json.loads((ROOT / "bench" / file).read_text()) for name, file in files.items()}
    assert measured["plugin"]["environment"]["sglang"] == "0.5.16"
    assert measured["own"]["environment"]["sglang"] == "0.5.17"
    rows = []
    for ours, theirs in zip(measured["plugin"]["time"], measured["own"]["time"], strict=True):
        eager, graphs = ours["eager"]["gpu_ms"]["median"], ours["graphs"]["gpu_ms"]["median"]
        host = theirs["graphs"]["gpu_ms"]["median"]
        cells = [str(ours["tokens"]), f"{eager:.1f} ms", f"{graphs:.1f} ms", f"{graphs / eager:.2f}", f"{host:.1f} ms"]
        rows.append(f"| {' | '.join(cells)} | {graphs / host:.2f} |")
    assert len(rows) == 5
    assert [line for line in README.splitlines() if line in rows] == rows


@pytest.mark.parametrize(
    ("file", "rows"), [("h200x2-sglang-0.5.16-default-ladder.json", 5), ("h200-dsv4-sglang-0.5.16-plugin.json", 4),
                       ("h200x2-dsv4-sglang-0.5.16-plugin.json", 4)]
)
def test_other_tables_of_speeds_are_what_was_measured(file: str, rows: int) -> None:
    """Every number of the tables without another release comes from a file in ``bench/``."""
    expected = []
    for row in json.loads((ROOT / "bench" / file).read_text())["time"]:
        eager, graphs = (row[kind]["gpu_ms"]["median"] for kind in ("eager", "graphs"))
        wall = row["graphs"]["wall_ms"]["median"] / row["eager"]["wall_ms"]["median"]
        expected.append(f"| {row['tokens']} | {eager:.1f} ms | {graphs:.1f} ms | {graphs / eager:.2f} | {wall:.2f} |")
    assert len(expected) == rows
    assert [line for line in README.splitlines() if line in expected] == expected


def test_what_is_said_of_deepseek_v4_s_metadata_and_memory_was_measured() -> None:
    """The refresh and the memory of graphs, from the same file; both also have targets."""
    measured = json.loads((ROOT / "bench" / "h200-dsv4-sglang-0.5.16-plugin.json").read_text())
    first, *_, last = measured["refresh"]
    ours, host = ([f"{row[side]['median']:.2f}" for row in (first, last)] for side in ("plugin", "host"))
    assert f"{ours[0]} ms at 64 tokens and {ours[1]} at 2048, SGLang's own {host[0]} and {host[1]} on the same batch" in README
    assert f"({first['ratio']:.2f} and {last['ratio']:.2f}); no wait" in README
    assert all(row["ratio"] <= 0.5 and not row["syncs"] for row in measured["refresh"])
    pinned = measured["capture"]["graph_bytes"]
    eager, beside = (measured["time"][-1][kind]["peak_bytes"] for kind in ("eager", "graphs"))
    numbers = [f"{value / 2**30:.2f} GiB" for value in (pinned, eager, beside, pinned + beside - eager)]
    assert f"{numbers[0]} are pinned" in README
    assert f"allocates {numbers[1]} eager and {numbers[2]} beside its graphs: {numbers[3]} more than eager" in README
