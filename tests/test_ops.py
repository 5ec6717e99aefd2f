"""Rules and dashboard: checked by promtool, and by a real Prometheus that scrapes a real server.

Both come with Debian's package ``prometheus``. Without them these tests skip, unless
``BCG_DSA_TEST_PROMETHEUS=required`` says that they must not, as CI does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_bcg_dsa import cli, traffic
from sglang_bcg_dsa.hooks.explain import states_of
from sglang_bcg_dsa.metrics import COUNTERS, GAUGES, PREFIX
from sglang_bcg_dsa.rehearse import CHUNK, LADDER, _metrics_problem, _rank_in_title
from sglang_bcg_dsa.report import from_metrics
from sglang_bcg_dsa.testing.models import VOCABULARY, write_model
from sglang_bcg_dsa.testing.server import ServerHandle, ServerSpec, free_port, running_server
from tests.conftest import PACKAGE, ROOT
from tests.test_rehearsal import ALL, HOST_VOTES_ON_FACTS

OPS = PACKAGE / "ops"
DASHBOARD = json.loads((OPS / "bcg-dsa-dashboard.json").read_text())
RULES = OPS / "bcg-dsa-rules.yml"
SECONDS = 2.0
"""Scrape interval, and so its time limit: on a busy machine an answer can take a second."""


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        hint = f"{name} is not installed (Debian: apt-get install prometheus)"
        assert os.environ.get("BCG_DSA_TEST_PROMETHEUS") != "required", hint
        pytest.skip(hint)
    return found


def promtool(*args: str, stdin: str | None = None) -> str:
    done = subprocess.run(
        [tool("promtool"), *args], input=stdin, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}"


def panels() -> list[tuple[str, str]]:
    """(title, expression) of every target of the dashboard, with Grafana's variables filled in."""
    found = []
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            text = target["expr"].replace("$__rate_interval", "1m").replace("$__range", "5m")
            found.append((panel["title"], re.sub(r"\$(instance|model)\b", ".*", text)))
    return found


# ---------------------------------------------------------------------- files


def test_rules_are_valid_and_do_what_they_say(tmp_path: Path) -> None:
    """promtool's unit tests: each alert fires where it should, and stays quiet where it should."""
    assert promtool("check", "rules", str(RULES)).startswith("exit 0")
    shutil.copy(RULES, tmp_path)
    tests = tmp_path / "tests.yml"
    shutil.copy(ROOT / "tests/prometheus_rules.yml", tests)
    assert promtool("test", "rules", str(tests)).startswith("exit 0"), promtool("test", "rules", str(tests))
    alerts = set(re.findall(r"alert: (\w+)", RULES.read_text()))
    assert alerts == set(re.findall(r"alertname: (\w+)", tests.read_text())), "every alert has a test"
    rules = tmp_path / RULES.name
    for old, new in (
        (" == 0 and", " == 1 and"), ("< 0.7 *", "< 0.1 *"), ("+ 2)", "+ 20)"), ("> 60", "> 200"), ("for: 5m", "for: 50m"),
    ):  # fmt: skip
        rules.write_text(RULES.read_text().replace(old, new))
        assert rules.read_text() != RULES.read_text()
        assert promtool("test", "rules", str(tests)).startswith("exit 1"), f"the tests do not notice {old} -> {new}"


def test_files_name_only_series_that_exist() -> None:
    """A renamed metric or label would leave a panel empty and an alert silent."""
    known = {PREFIX + name: {*names, "instance", "job", "model_name", "dp_rank", "tp_rank", "engine_type"}
             for name, (_, names) in (COUNTERS | GAUGES).items()}  # fmt: skip
    shown: dict[str, set[str]] = {}
    for file, text in (("rules", RULES.read_text()), ("dashboard", json.dumps(DASHBOARD).replace('\\"', '"'))):
        for name, labels in re.findall(r'\{__name__=~"sglang\[:_\](bcg_dsa_\w+)"([^{}]*)\}', text):
            shown.setdefault(file, set()).add(f"sglang:{name}")
            assert set(re.findall(r"(\w+)=", labels)) <= known[f"sglang:{name}"], (name, labels)
    assert set(known) - shown["dashboard"] == {PREFIX + "capture_failed_total"}, "which has an alert, and is 0 on any panel"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Unique panels that do not overlap, on a 24-column grid, each with a data source variable and a description."""
    taken: set[tuple[int, int]] = set()
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken and max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["title"] and panel["description"]
    assert [v["name"] for v in DASHBOARD["templating"]["list"]] == ["datasource", "model", "instance"]


def test_they_are_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``dashboards DIR``: the files of the package, byte for byte, and their paths."""
    assert cli.main(["dashboards", str(tmp_path / "new")]) == 0
    written = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [p.name for p in written] == sorted(p.name for p in OPS.iterdir())
    assert all(p.read_bytes() == (OPS / p.name).read_bytes() for p in written)


# ---------------------------------------------------------------------- a real server, a real Prometheus


class Prometheus:
    """A running Prometheus server."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> Any:
        """The data of one API call; an error of Prometheus carries its words."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        try:
            with urllib.request.urlopen(url, timeout=10) as response:
                text = response.read().decode()
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it starts
                raise
            raise AssertionError(f"{query}: {error.read().decode()}") from None
        return json.loads(text)["data"] if path.startswith("/api") else text

    def query(self, expression: str) -> list[dict[str, Any]]:
        """An instant vector, now."""
        found: list[dict[str, Any]] = self.get("/api/v1/query", query=expression)["result"]
        return found


@contextlib.contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Prometheus with our rules, scraping ``target``."""
    port = free_port()
    (folder / "prometheus.yml").write_text(
        f"global: {{scrape_interval: {SECONDS * 1000:.0f}ms, evaluation_interval: 1s}}\n"
        f"rule_files: ['{RULES}']\n"
        f"scrape_configs: [{{job_name: sglang, static_configs: [{{targets: ['{target}']}}]}}]\n"
    )
    argv = [tool("prometheus"), f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    with (folder / "prometheus.log").open("wb") as log, subprocess.Popen(
        [*argv, f"--web.listen-address=127.0.0.1:{port}"], stdout=subprocess.DEVNULL, stderr=log
    ) as process:
        try:
            server = Prometheus(port)
            until(lambda: server.get("/-/ready"), 20)
            yield server
        finally:
            process.kill()


def until(what: Callable[[], Any], seconds: float) -> Any:
    """Its first true answer; AssertionError when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := what():
                return found
        except OSError as error:
            found = error
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def send(server: ServerHandle) -> None:
    """Mixed traffic: lone requests, bursts, prefixes, chunks."""
    with ThreadPoolExecutor(8) as pool:
        for wave in traffic.waves(7, 24, 2, LADDER, CHUNK, VOCABULARY):
            list(pool.map(lambda prompt: server.generate(prompt, 4), wave.prompts))


def ours(name: str) -> str:
    """A selector of one of our series, as Prometheus 2 and 3 name it."""
    return f'{{__name__=~"sglang[:_]bcg_dsa_{name}"}}'


def waiting(server: ServerHandle) -> float:
    return max(s["vote_waiting_seconds"] for s in from_metrics("/metrics", server.metrics()))


# A server takes half a minute to start; on the other host of the suite the rehearsal compares /metrics.
if ALL or HOST_VOTES_ON_FACTS:

    def test_a_real_prometheus_and_a_report_of_a_real_server(tmp_path: Path) -> None:
        """Every panel has data, every rule evaluates, no alert fires; ``report`` reads the live server; a rank that is
        waited for is seen."""
        tool("prometheus")
        spec = ServerSpec(
            write_model(tmp_path / "model", "dense"), tp=2, dp=2, dp_attention=True, ladder=LADDER, chunked_prefill_size=CHUNK,
            extra_args=("--plugins", "bcg_dsa"), env={"TORCHDYNAMO_DISABLE": "1"},
        )  # fmt: skip
        with running_server(spec, tmp_path) as server, prometheus(tmp_path, f"127.0.0.1:{server.port}") as scraper:
            until(lambda: scraper.query(ours("prefill_total")), 20)
            send(server)
            states = states_of(server.server_info())
            assert _metrics_problem(server, states) is None
            time.sleep(2 * SECONDS)
            _check_text(server.metrics())
            _check_series(scraper, states)
            _check_rules(scraper)
            _check_report(server, tmp_path)
            _check_stall(server)


def _check_text(text: str) -> None:
    """promtool's lint has nothing against our series but the colon that all of SGLang's have."""
    ours = "".join(line + "\n" for line in text.splitlines() if PREFIX in line)
    said = [line for line in promtool("check", "metrics", stdin=ours).splitlines()[1:] if line]
    assert [line for line in said if "should not contain ':'" not in line] == []


def _check_series(scraper: Prometheus, states: list[dict[str, Any]]) -> None:
    """What Prometheus holds is what the ranks say, under SGLang's labels; every panel shows something."""
    held = {
        (int(s["metric"]["dp_rank"]), s["metric"]["path"]): float(s["value"][1])
        for s in scraper.query(f"sum by (dp_rank, path) ({ours('prefill_total')})")
    }
    assert held == {(s["rank"]["dp"], path): n for s in states for path, n in s["prefill"].items()}
    assert sum(s["prefill"]["replay"] for s in states)
    assert sum(s["prefill"]["eager"] for s in states)
    labels = set(scraper.query(ours("prefill_total"))[0]["metric"]) - {"path", "reason"}
    assert labels == set(scraper.query('{__name__=~"sglang[:_]num_running_reqs"}')[0]["metric"])
    for title, expression in panels():
        # A CPU does not tell its memory; that panel has the shape of its neighbour's.
        expression = expression.replace("capture_bytes", "capture_seconds")
        found = scraper.query(expression)
        assert found, f"{title}: no data for {expression}"
        assert all(s["value"][1] not in ("NaN", "+Inf") for s in found if "by (instance" not in expression), title


def _check_rules(scraper: Prometheus) -> None:
    """All rules have been evaluated without an error, and a healthy server raises no alert."""
    def rules() -> list[dict[str, Any]]:
        return [rule for group in scraper.get("/api/v1/rules")["groups"] for rule in group["rules"]]

    until(lambda: all(rule["health"] != "unknown" for rule in rules()), 10)
    assert len(rules()) == 9
    assert [(rule["name"], rule.get("lastError")) for rule in rules() if rule["health"] != "ok"] == []
    assert [alert for alert in scraper.get("/api/v1/alerts")["alerts"] if alert["state"] == "firing"] == []


def _check_report(server: ServerHandle, folder: Path) -> None:
    """The command, on the live server while requests run, and on its log."""
    argv = [sys.executable, "-m", "sglang_bcg_dsa.cli", "report", "--json"]
    with subprocess.Popen(
        [*argv, server.url, "--watch", "4", "--plots", str(folder / "plots")], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as process:
        deadline = time.monotonic() + 30
        while process.poll() is None and time.monotonic() < deadline:
            server.generate([5, 6, 7], 1)
        shown = json.loads(process.communicate(timeout=10)[0])
    assert [rank["name"] for rank in shown["ranks"]] == ["DP0", "DP1"]
    assert len({point["time"] for point in shown["points"]}) > 1
    assert 0 < shown["coverage"] < 1
    assert {Path(p).name for p in shown["plots"]} == {"coverage.png", "reasons.png", "tokens.png", "capture.png"}
    assert all(rank["vote_waiting_seconds"] is not None for rank in shown["ranks"])
    done = subprocess.run([*argv, str(server.log_path)], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["prefill"]["replay"] > 0


def _check_stall(server: ServerHandle) -> None:
    """While one rank is stopped, the other's metrics say how long there was no vote: it waits there, or for requests."""
    (rank,) = [pid for pid in server.pids() if _rank_in_title(pid) == 1]
    until(lambda: waiting(server) < 1, 15)
    os.kill(rank, signal.SIGSTOP)
    try:
        until(lambda: waiting(server) > 3, 15)
    finally:
        os.kill(rank, signal.SIGCONT)
    until(lambda: waiting(server) < 1, 15)
