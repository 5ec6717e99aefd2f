"""``report``: every kind of source, over time, what it cannot read, its advice, its pictures."""

from __future__ import annotations

import contextlib
import copy
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sglang_bcg_dsa import cli, plots, reasons, report
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.reasons import NAMES, ReasonTable, cure
from sglang_bcg_dsa.records import Captured
from sglang_bcg_dsa.report import Point, ReportError, read
from sglang_bcg_dsa.vote import Vote, tally
from tests.test_explain import eager, replay

LOG = """\
[2026-11-30 10:00:00 DP0 TP0] sglang-bcg-dsa: prefill graphs: on, backend breakable, [16, 32]
[2026-11-30 10:00:05 DP0 TP0] Prefill batch, #new-seq: 1, #new-token: 9, #cached-token: 0, token usage: 0.01, cpu graph: True, \
input throughput (token/s): 12.00
[2026-11-30 10:00:06 DP1 TP1] Prefill batch, #new-seq: 1, #new-token: 9, full token usage: 0.01, cuda graph: True, x: 1
[2026-11-30 10:00:09 DP0 TP0] Prefill batch [7], #new-seq: 1, #new-token: 9, cuda graph: False, input throughput: 1
[2026-11-30 10:01:05 DP0 TP0] sglang-bcg-dsa: 3 prefills in the last 60 s, 2 replayed (66.7 %); since start 66.7 %; reasons: \
padding 1, prefix 2
some line of another program
"""


def info(replays: int = 6, eagers: int = 2, at: float = 1000.0, ranks: int = 2) -> dict[str, Any]:
    """What a server answers under /server_info after this many prefills a rank."""
    states = []
    for rank in range(ranks):
        ledger = Ledger(ReasonTable())
        for size in (16, 32, 64):
            ledger.count_captured(Captured(size, 0.1 * size, size * 1_000_000 * (rank + 1)))
        for i in range(replays):
            ledger.count_forward(replay(12, 16 << i % 2))
        for _ in range(eagers):
            ledger.count_forward(eager(reasons.PADDING | reasons.PREFIX))
            votes = [Vote(0, 5, True, True, 0), Vote(1, 5, True, False, reasons.PADDING | reasons.PREFIX)]
            ledger.count_verdict(tally(1, votes, RunnerFacts((16,))))
        state = {"version": "0.1.0", "time": at, "rank": {"dp": rank, "tp": rank}, "features": {}, **ledger.snapshot()}
        states.append({"theirs": 1, "bcg_dsa": state})
    return {"internal_states": states}


def saved(path: Path, document: object) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def test_a_document_of_server_info(tmp_path: Path) -> None:
    """Coverage, reasons, who refused, buckets with padding, and the costliest capture of all ranks."""
    found = read([saved(tmp_path / "info.json", info())])
    assert (found.ranks, found.coverage, found.points) == (["DP0", "DP1"], 0.75, [])
    assert found.reasons == {"prefix": 4, "padding": 4}
    assert found.refusals == {"padding": {1: 2}, "prefix": {1: 2}}
    table = found.by_bucket()
    assert table[16] == {"replays": 6, "real": 72, "padded": 24, "seconds": 1.6, "bytes": 32_000_000}
    assert table[64] == {"replays": 0, "real": 0, "padded": 0, "seconds": 6.4, "bytes": 128_000_000}
    assert cure("prefix") in (found.advice() or "")
    assert "4 of 4 eager prefills, refused by DP1" in (found.advice() or "")
    json.dumps(found.as_json(), allow_nan=False)


def test_documents_over_time_are_intervals(tmp_path: Path) -> None:
    """Order is by the documents' own time; counters that went back are a restart, and say so."""
    paths = [
        saved(tmp_path / f"{name}.json", info(replays, eagers, at))
        for name, replays, eagers, at in (("c", 2, 0, 1120.0), ("a", 6, 2, 1000.0), ("b", 9, 12, 1060.0))
    ]
    found = read(paths)
    assert [p for p in found.points if p.rank == "DP0"] == [Point("DP0", 1060.0, 3, 10), Point("DP0", 1120.0, 2, 0)]
    assert found.coverage == 1.0, "the last document's"
    assert any("DP1 was started anew between" in note for note in found.notes)


def test_logs(tmp_path: Path) -> None:
    """SGLang's line for each prefill counts; our summary has the reasons; what logs do not tell is not made up."""
    found = read([saved(tmp_path / "server.log", LOG)])
    assert (found.ranks, found.replayed, found.eager) == (["DP0", "DP1"], 2, 1)
    assert found.reasons == {"prefix": 2, "padding": 1}
    assert [(p.rank, p.replayed, p.eager) for p in found.points] == [("DP0", 1, 0), ("DP0", 0, 1), ("DP1", 1, 0)]
    assert found.by_bucket() == {}
    assert found.notes[0] == "prefill graphs: on, backend breakable, [16, 32]"


def test_logs_without_the_host_s_lines(tmp_path: Path) -> None:
    """Our summaries and the zero-coverage warning are enough."""
    summaries = "\n".join(line for line in LOG.splitlines() if "Prefill batch" not in line)
    assert (read([saved(tmp_path / "a.log", summaries)]).replayed, read([str(tmp_path / "a.log")]).eager) == (2, 1)
    warning = (
        "[2026-11-30 10:00:00 TP0] sglang-bcg-dsa: none of the first 20 prefills replayed a graph. Reasons: prefix (20: a "
        "cached prefix needs an attention path that was not captured); theirs (3)\n"
    )
    found = read([saved(tmp_path / "b.log", warning)])
    assert (found.replayed, found.eager, found.reasons) == (0, 20, {"prefix": 20, "theirs": 3})


def test_a_long_log_has_few_points(tmp_path: Path) -> None:
    """A day of prefills is drawn with at most as many points as a line can show, and none is lost."""
    lines = [f"[2026-11-30 {i // 3600:02}:{i // 60 % 60:02}:{i % 60:02}] Prefill batch, cuda graph: True" for i in range(9000)]
    found = read([saved(tmp_path / "long.log", "\n".join(lines))])
    assert len(found.points) <= 121
    assert sum(p.replayed for p in found.points) == found.replayed == 9000


def test_every_reason_has_a_cure() -> None:
    """The advice is never empty, for reasons of plugins neither."""
    assert all(len(cure(name)) > 15 for name in (*NAMES, "theirs"))
    assert len({cure(name) for name in NAMES}) > 12


def test_names_of_ranks_are_distinct() -> None:
    """Attention-TP ranks share a DP rank; replicas share everything."""

    def named(*ranks: tuple[int, int]) -> list[str]:
        return report.names([{"rank": {"dp": dp, "tp": tp}} for dp, tp in ranks])

    assert named((0, 0), (1, 1)) == ["DP0", "DP1"]
    assert named((0, 0), (0, 1), (1, 2)) == ["DP0 TP0", "DP0 TP1", "DP1"]
    assert len(set(named((0, 0), (0, 0), (0, 0)))) == 3


# ---------------------------------------------------------------------- live


@contextlib.contextmanager
def serving(answer: Callable[[str, str | None], tuple[int, str]]) -> Iterator[str]:
    """A server that answers GET with ``answer(path, authorization)``."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, text = answer(self.path, self.headers["Authorization"])
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_live_server_is_watched(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Samples of a URL are a line over time; the key goes along; without /metrics a note says how to get it."""
    asked = iter(range(1, 100))

    def answer(path: str, key: str | None) -> tuple[int, str]:
        assert key == "Bearer secret"
        if path != "/server_info":
            return 404, ""
        n = next(asked)
        return 200, json.dumps(info(3 * n, n, 1000.0 + n))

    with serving(answer) as url:
        assert cli.main(["report", f"{url}/metrics", "--api-key", "secret", "--watch", "2.2", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(p["replayed"], p["eager"]) for p in shown["points"] if p["rank"] == "DP1"] == [(3, 1), (3, 1)]
    assert any("--enable-metrics" in note for note in shown["notes"])


def old() -> dict[str, Any]:
    document = copy.deepcopy(info())
    for state in document["internal_states"]:
        del state["bcg_dsa"]["bucket_tokens"]
    return document


def damaged(**fields: object) -> dict[str, Any]:
    document = copy.deepcopy(info())
    document["internal_states"][0]["bcg_dsa"] |= fields
    return document


BAD = {
    "missing": (None, "no such file"),
    "empty": ("  \n", "is empty"),
    "other JSON": ({"a": 1}, "no /server_info of SGLang"),
    "a list": ([1], "or /server_info JSON"),
    "cut off": ('{"internal_states": [', "was it cut off?"),
    "no plugin": ({"internal_states": [{"theirs": 1}]}, "start it with --plugins bcg_dsa"),
    "old": (old(), "sglang-bcg-dsa 0.1.0, whose entry has no bucket_tokens"),
    "other metrics": ("# TYPE up gauge\nup 1\n", "no sglang:bcg_dsa_* series"),
    "broken metrics": ("# TYPE up gauge\nup{ 1\n", "no Prometheus text"),
    "other log": ("hello\nworld\n", "no prefill in this log"),
    "binary": ("\0\1\2", "is not text"),
    "states of another kind": ({"internal_states": [5, None, "bcg_dsa"]}, "the plugin is not active"),
    "no entry": ({"internal_states": [{"bcg_dsa": None}]}, "damaged (Expected `object`, got `null`)"),
    "not a rank": (damaged(rank="x"), "at `bcg_dsa.rank`"),
    "not a number": (damaged(prefill={"replay": float("nan"), "eager": 0}), "at `bcg_dsa.prefill.replay`"),
    "less than nothing": (damaged(prefill={"replay": -1, "eager": 0}), "Expected `int` >= 0"),
    "no time": (damaged(time=float("nan")), "at `bcg_dsa.time`"),
    "half a vote": (damaged(votes_no=[{"rank": 0}]), "required field `reason`"),
    "not a bucket": (damaged(buckets={"x": 1}), "`bcg_dsa.buckets`"),
    "another kind of token": (damaged(bucket_tokens={"16": {"other": 1}}), "`bcg_dsa.bucket_tokens"),
    "deep": ('{"a":' * 100_000, "looks like JSON and is not"),
    "NaN": ('# TYPE x counter\nsglang:bcg_dsa_prefill_total{path="eager",reason="prefix"} NaN\n', "series is damaged"),
    "infinity": ('# TYPE x counter\nsglang:bcg_dsa_prefill_total{path="eager",reason="prefix"} +Inf\n', "series is damaged"),
    "no label": ("# TYPE x counter\nsglang:bcg_dsa_prefill_total 1\n", "damaged (KeyError: 'path')"),
    "not a DP rank": ('# TYPE x counter\nsglang:bcg_dsa_bucket_total{bucket="16",dp_rank="a"} 1\n', "series is damaged"),
    "bucket of no size": ('# TYPE x counter\nsglang:bcg_dsa_bucket_total{bucket="a"} 1\n', "`bcg_dsa.buckets`"),
    "no such day": ("[2026-99-99 10:00:00] Prefill batch, cuda graph: True\n", "no prefill in this log"),
    "summary of nothing": (LOG.splitlines()[4].replace(": 3 prefills", ": 0 prefills"), "no prefill in this log"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, which file, what was found and what to do; nothing on standard output."""
    document, words = BAD[name]
    path = tmp_path / "given"
    if document is not None:
        saved(path, document)
    assert cli.main(["report", str(path), "--json"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert words in err and str(path) in err


def test_bad_servers_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Refused, not SGLang, locked, or without the plugin."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        cases = [(f"http://127.0.0.1:{unused.getsockname()[1]}", "refused")]
        for url, words in cases:
            assert cli.main(["report", url]) == 2
            assert words in capsys.readouterr().err
    for status, text, words in (
        (404, "", "is it a server of SGLang?"), (401, "", "wants --api-key"), (200, "<html>", "no /server_info"),
        (200, json.dumps({"internal_states": []}), "--plugins bcg_dsa"),
    ):  # fmt: skip
        with serving(lambda path, key, answer=(status, text): answer) as url:  # type: ignore[misc]
            assert cli.main(["report", url]) == 2
            err = capsys.readouterr().err
            assert words in err or "looks like JSON and is not" in err
            assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"SSH-2.0-x\r\n", "SSH-2.0-x"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{", "IncompleteRead"),
        (b"", "closed connection"),
    ],
    ids=["no HTTP", "cut off", "silent"],
)
def test_what_does_not_speak_http_is_one_line(data: bytes, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Another service's port, or a connection that breaks in the middle of the answer."""

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer)
        thread.start()
        assert cli.main(["report", f"http://127.0.0.1:{listener.getsockname()[1]}"]) == 2
        thread.join(10)
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://h:abc", "http://a b/", "http://[::1", "http://"])
def test_what_is_no_url_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 without a traceback."""
    assert cli.main(["report", url]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_watch_outlasts_a_sample_that_fails() -> None:
    """A restart must not lose hours of samples: what is missing is said."""
    asked = iter(range(1, 100))

    def answer(path: str, key: str | None) -> tuple[int, str]:
        if path != "/server_info":
            return 404, ""
        n = next(asked)
        return (503, "") if n == 2 else (200, json.dumps(info(3 * n, n, 1000.0 + n)))

    with serving(answer) as url:
        found = read([url], watch=2.5)
    assert [p.replayed for p in found.points if p.rank == "DP0"] == [6]
    assert any("1 samples are missing" in note and "HTTP 503" in note for note in found.notes)


def test_the_key_does_not_go_to_another_host() -> None:
    """A redirect is followed, without what only the first host may know."""
    seen: list[str | None] = []

    def elsewhere(path: str, key: str | None) -> tuple[int, str]:
        seen.append(key)
        return (200, json.dumps(info())) if path == "/server_info" else (404, "")

    class Redirect(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(self.headers["Authorization"])
            self.send_response(307)
            self.send_header("Location", target + self.path)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with serving(elsewhere) as target, ThreadingHTTPServer(("127.0.0.1", 0), Redirect) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            found = read([f"http://127.0.0.1:{server.server_port}"], api_key="secret")
        finally:
            server.shutdown()
            thread.join()
    assert found.ranks == ["DP0", "DP1"]
    assert seen == ["Bearer secret", None] * 2


def test_metrics_of_pipeline_stages_are_kept_apart_and_votes_are_not_added_up(tmp_path: Path) -> None:
    """Stages, and attention-TP ranks that publish, count the same forwards and the same votes."""
    text = "# TYPE x counter\n" + "".join(
        f'sglang:bcg_dsa_prefill_total{{path="eager",reason="prefix",dp_rank="0",tp_rank="0",pp_rank="{stage}"}} 4\n'
        f'sglang:bcg_dsa_vote_no_total{{rank="0",reason="prefix",dp_rank="0",tp_rank="0",pp_rank="{stage}"}} 3\n'
        for stage in (0, 1)
    )
    found = read([saved(tmp_path / "metrics", text)])
    assert len(set(found.ranks)) == 2
    assert [(s["prefill"]["eager"], s["reasons"]) for s in found.states] == [(4, {"prefix": 4})] * 2
    assert found.refusals == {"prefix": {0: 3}}


def test_a_picture_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and its name."""
    (tmp_path / "reasons.png").mkdir()
    assert cli.main(["report", saved(tmp_path / "info.json", info()), "--plots", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "reasons.png cannot be written" in err


def test_sources_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """One server, one kind of source."""
    two, three = saved(tmp_path / "2.json", info()), saved(tmp_path / "3.json", info(ranks=3))
    log = saved(tmp_path / "s.log", LOG)
    for sources, words in (
        ([two, three], "not one server over time"), ([two, log], "on logs or on documents"),
        (["http://x:1", two], "give one URL, or files alone"),
    ):  # fmt: skip
        with pytest.raises(ReportError, match=words):
            read(sources)
    with pytest.raises(ReportError, match="samples a live server"):
        read([two], watch=5)


# ---------------------------------------------------------------------- pictures


def pixels(path: Path) -> tuple[int, int, int]:
    """Width, height and number of different byte values of a PNG's image data."""
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    at, packed = 8, b""
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        packed += data[at + 8 : at + 8 + size] if kind == b"IDAT" else b""
        at += size + 12
    return width, height, len(set(zlib.decompress(packed)))


def test_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All four are drawn from documents over time; from one log those it has numbers for, and a note for the others."""
    paths = [saved(tmp_path / f"{n}.json", info(6 * n, 2 * n * n, 1000.0 + 60 * n)) for n in range(1, 5)]
    assert cli.main(["report", *paths, "--plots", str(tmp_path / "p"), "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["plots"]
    assert [Path(p).name for p in written] == ["coverage.png", "reasons.png", "tokens.png", "capture.png"]
    for path in written:
        width, height, values = pixels(Path(path))
        assert (width, height > 400, values > 20) == (1350, True, True)
    log = saved(tmp_path / "s.log", LOG)
    assert cli.main(["report", log, "--plots", str(tmp_path / "q"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [Path(p).name for p in shown["plots"]] == ["coverage.png", "reasons.png"]
    assert any(note.startswith("tokens.png: ") for note in shown["notes"])


def test_without_matplotlib_the_message_says_what_to_install(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read."""
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert cli.main(["report", "nothing.json", "--plots", str(tmp_path)]) == 2
    assert "pip install 'sglang-bcg-dsa[plots]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is read, with the folder and the reason."""
    for argv in (["report", "x", "--plots", "/proc/nowhere"], ["dashboards", "/proc/nowhere"]):
        assert cli.main(argv) == 2
        assert "/proc/nowhere cannot be" in capsys.readouterr().err


def test_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What an operator reads: ranks, reasons with meaning, who refused, advice, buckets."""
    assert cli.main(["report", saved(tmp_path / "info.json", info())]) == 0
    out = capsys.readouterr().out
    for words in ("coverage 75.0 %", "DP1", "DP1 (2)", "a cached prefix needs", cure("prefix")[:40], "capture MB", "128.0"):
        assert words in out
