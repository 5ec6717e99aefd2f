"""What a server did with its prefills, from whatever there is of it: a URL, documents, logs.

Contract: every source becomes the entries that a server shows under ``/server_info`` (``states``)
and prefills by rank and time (``points``). ``/server_info`` and ``/metrics`` documents hold counters
since the server's start; several of them are one server over time, told apart by their file's
time. Logs hold less: prefills by time and reasons, not buckets, padding or capture; what a source
does not tell is None. Anything that cannot be read is one :class:`ReportError` that says what was
found, what was expected and what to do.
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from sglang_bcg_dsa.hooks.explain import STATE_KEY, states_of
from sglang_bcg_dsa.metrics import PREFIX
from sglang_bcg_dsa.reasons import cure

State = dict[str, Any]
Say = Callable[[str], None]

_NEEDED = ("version", "rank", "prefill", "reasons", "votes_no", "tokens", "buckets", "bucket_tokens", "capture", "adapter_us")
_BINS = 120
"""Points of a line: a log of days has a prefill every few milliseconds."""
_WATCHES = 120
"""Samples of one ``--watch``, at most one a second."""


class ReportError(ValueError):
    """A source that cannot be reported on."""


_Count = Annotated[int, msgspec.Meta(ge=0)]
_Real = Annotated[float, msgspec.Meta(ge=0, le=1e11)]
"""Also a time: until the year 5138. Not NaN, not infinity."""
_Bucket = Annotated[str, msgspec.Meta(pattern=r"^\d{1,9}$")]
_Tokens = dict[Literal["real", "padded"], _Count]


class _Rank(msgspec.Struct):
    dp: _Count
    tp: _Count


class _Prefill(msgspec.Struct):
    replay: _Count
    eager: _Count


class _No(msgspec.Struct):
    rank: _Count
    reason: str
    votes: _Count


class _Entry(msgspec.Struct):
    """What is used of one rank's entry, as its server writes it; more than this may be there."""

    rank: _Rank
    prefill: _Prefill
    coverage: _Real | None
    reasons: dict[str, _Count]
    votes_no: list[_No]
    tokens: _Tokens
    buckets: dict[_Bucket, _Count]
    bucket_tokens: dict[_Bucket, _Tokens]
    capture: dict[_Bucket, dict[Literal["seconds", "bytes"], _Real | None]]
    adapter_us: dict[str, _Real | None] | None
    time: _Real = 0.0
    vote_waiting_seconds: _Real | None = None


def _check(source: str, states: Iterable[State]) -> None:
    """Raise ReportError for an entry that no server of ours writes."""
    for state in states:
        try:
            msgspec.convert(state, _Entry)
        except msgspec.ValidationError as error:
            what = str(error).replace("`$", f"`{STATE_KEY}")
            raise ReportError(f"{source}: an entry of the plugin is damaged ({what}); fetch the document anew") from None


class Point(NamedTuple):
    """Prefills of one rank in the time since its point before."""

    rank: str
    time: float
    """Seconds since the epoch, at the end."""
    replayed: int
    eager: int


class Sample(NamedTuple):
    """All ranks of a server at one time."""

    source: str
    time: float
    states: list[State]


@dataclass
class Report:
    """What was found. ``states``: by rank, the last there is; their numbers are since the server's start."""

    sources: list[str]
    states: list[State]
    points: list[Point]
    notes: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> list[str]:
        """Names of the ranks, in the order of ``states``."""
        return names(self.states)

    @property
    def replayed(self) -> int:
        """Prefill forwards that replayed, all ranks."""
        return sum(int(s["prefill"]["replay"]) for s in self.states)

    @property
    def eager(self) -> int:
        """Prefill forwards that ran eagerly, all ranks."""
        return sum(int(s["prefill"]["eager"]) for s in self.states)

    @property
    def coverage(self) -> float | None:
        """Share of prefill forwards that replayed, all ranks; None before the first."""
        forwards = self.replayed + self.eager
        return self.replayed / forwards if forwards else None

    @property
    def reasons(self) -> dict[str, int]:
        """Eager forwards by reason, all ranks, most frequent first."""
        counts: dict[str, int] = defaultdict(int)
        for state in self.states:
            for name, times in state["reasons"].items():
                counts[name] += times
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    @property
    def refusals(self) -> dict[str, dict[int, int]]:
        """Votes against by reason and DP rank: what one rank saw, which is what all did."""
        found: dict[str, dict[int, int]] = defaultdict(dict)
        for row in next((s["votes_no"] for s in self.states if s["votes_no"]), ()):
            found[row["reason"]][int(row["rank"])] = int(row["votes"])
        return dict(found)

    def by_bucket(self) -> dict[int, dict[str, Any]]:
        """``replays``, ``real`` and ``padded`` tokens of all ranks, ``seconds`` and ``bytes`` of the costliest capture."""
        table: dict[int, dict[str, Any]] = {}
        for state in self.states:
            for size in {*(state["buckets"] or ()), *(state["capture"] or ())}:
                row = table.setdefault(int(size), {"replays": 0, "real": 0, "padded": 0, "seconds": None, "bytes": None})
                row["replays"] += (state["buckets"] or {}).get(size, 0)
                for kind, tokens in (state["bucket_tokens"] or {}).get(size, {}).items():
                    row[kind] += tokens
                for what, taken in (state["capture"] or {}).get(size, {}).items():
                    row[what] = max((n for n in (row[what], taken) if n is not None), default=None)
        return dict(sorted(table.items()))

    def advice(self) -> str | None:
        """What to do about the most frequent reason, in words; None when all replayed."""
        if not self.reasons:
            return None
        name, times = next(iter(self.reasons.items()))
        by = [f"DP{rank}" for rank in self.refusals.get(name, {})]
        return (
            f"{name} is the most frequent reason ({times} of {self.eager} eager prefills"
            f"{', refused by ' + ', '.join(by) if by and len(by) <= 8 else ''}). {cure(name)}"
        )

    def as_json(self) -> dict[str, Any]:
        """Everything in builtin types."""
        return {
            "sources": self.sources,
            "coverage": self.coverage,
            "prefill": {"replay": self.replayed, "eager": self.eager},
            "reasons": self.reasons,
            "refusals": [
                {"reason": reason, "rank": rank, "votes": votes}
                for reason, ranks in self.refusals.items() for rank, votes in sorted(ranks.items())
            ],
            "advice": self.advice(),
            "buckets": {str(size): row for size, row in self.by_bucket().items()},
            "ranks": [{"name": name, **state} for name, state in zip(self.ranks, self.states, strict=True)],
            "points": [point._asdict() for point in self.points],
            "notes": self.notes,
        }  # fmt: skip


def names(states: Sequence[State]) -> list[str]:
    """A name for each rank: its DP rank; with TP rank, or a number, where several have the same."""
    ranks = [(s["rank"]["dp"], s["rank"]["tp"]) for s in states]
    alone = Counter(dp for dp, _ in ranks)
    made = [f"DP{dp}" if alone[dp] == 1 else f"DP{dp} TP{tp}" for dp, tp in ranks]
    return [f"{name} #{made[: i + 1].count(name)}" if made.count(name) > 1 else name for i, name in enumerate(made)]


# ---------------------------------------------------------------------- sources


def read(sources: Sequence[str], *, watch: float = 0.0, api_key: str | None = None, say: Say = lambda text: None) -> Report:
    """Read everything; ReportError for what cannot be read, or does not belong together.

    ``watch``: seconds during which a URL is sampled.
    """
    urls = [s for s in sources if re.match(r"https?://", s, re.I)]
    if urls and len(sources) > 1:
        raise ReportError(f"{len(sources)} sources with a URL among them: give one URL, or files alone")
    if watch and not urls:
        raise ReportError(f"--watch samples a live server: give its URL instead of {', '.join(sources)}")
    if urls:
        return _live(urls[0], watch, api_key, say)
    samples: list[Sample] = []
    logs: list[tuple[str, str]] = []
    for source in sources:
        text = _text(source)
        if text.lstrip().startswith("{"):
            samples.append(_from_server_info(source, Path(source).stat().st_mtime, _parsed(source, text)))
        elif re.search(r"^# (HELP|TYPE) ", text, re.M):
            samples.append(Sample(source, Path(source).stat().st_mtime, from_metrics(source, text)))
        else:
            logs.append((source, text))
    if samples and logs:
        raise ReportError(f"{logs[0][0]} is a log and {samples[0].source} a document: report on logs or on documents")
    return _from_logs(logs) if logs else _over_time(samples)


def _text(source: str) -> str:
    path = Path(source)
    try:
        data = path.read_bytes()
    except OSError as error:
        what = error.strerror if path.exists() else "no such file, and no URL (http://HOST:PORT)"
        raise ReportError(f"{source}: {what}") from None
    if not data.strip():
        raise ReportError(f"{source} is empty")
    if b"\0" in data[:4096]:
        raise ReportError(f"{source} is not text; expected /server_info JSON, /metrics text or a log of SGLang")
    return data.decode(errors="replace")


def _parsed(source: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ReportError(f"{source} looks like JSON and is not ({error}); was it cut off?") from None


def _live(url: str, watch: float, api_key: str | None, say: Say) -> Report:
    base = re.sub(r"/(server_info|metrics)?/?$", "", url)
    samples = [_sample(base, api_key)]
    missed: list[ReportError] = []
    until = time.monotonic() + watch
    pause = max(1.0, watch / _WATCHES)
    try:
        while time.monotonic() + pause <= until:
            time.sleep(pause)
            try:
                samples.append(_sample(base, api_key))
            except ReportError as error:  # a restart, or a server too busy to answer: what there is of the watch counts
                missed.append(error)
            say(f"{len(samples)} samples{f', {len(missed)} missed ({missed[-1]})' if missed else ''}")
    except KeyboardInterrupt:
        say(f"stopped after {len(samples)} samples")
    report = _over_time(samples)
    report.sources = [base]
    if missed:
        report.notes.append(f"{len(missed)} samples are missing; the last because of {missed[-1]}")
    try:
        waits = from_metrics(base, _get(f"{base}/metrics", api_key))
    except ReportError as error:
        report.notes.append(f"no metrics of ours under /metrics ({error}); --enable-metrics starts them")
    else:
        for state in report.states:
            same = [w for w in waits if w["rank"] == state["rank"]]
            state["vote_waiting_seconds"] = same[0]["vote_waiting_seconds"] if same else None
    return report


def _sample(base: str, api_key: str | None) -> Sample:
    url = f"{base}/server_info"
    return _from_server_info(url, time.time(), _parsed(url, _get(url, api_key)))


def _get(url: str, api_key: str | None) -> str:
    try:
        request = urllib.request.Request(url)
        if api_key:  # for this host alone, not for one it redirects to
            request.add_unredirected_header("Authorization", f"Bearer {api_key}")
        with urllib.request.urlopen(request, timeout=20) as response:
            return str(response.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        error.close()
        why = {401: ": it wants --api-key", 403: ": it wants another --api-key", 404: ": is it a server of SGLang?"}
        raise ReportError(f"{url}: HTTP {error.code}{why.get(error.code, '')}") from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ReportError(f"{url}: {str(getattr(error, 'reason', error)).strip() or type(error).__name__}") from None


def _from_server_info(source: str, at: float, info: Any) -> Sample:
    if not isinstance(info, dict) or not isinstance(info.get("internal_states"), list):
        raise ReportError(f"{source} is JSON, but no /server_info of SGLang: it has no list 'internal_states'")
    ours = [s for s in info["internal_states"] if isinstance(s, dict) and STATE_KEY in s]
    if not ours:
        raise ReportError(f"{source}: the plugin is not active in this server: start it with --plugins bcg_dsa, and [explain] on")
    for state in (s[STATE_KEY] for s in ours):
        if isinstance(state, dict) and (missing := [key for key in _NEEDED if key not in state]):
            raise ReportError(
                f"{source}: the server runs sglang-bcg-dsa {state.get('version', '(unknown)')}, whose entry has no "
                f"{', '.join(missing)}; install the release of this command there"
            )
    _check(source, (s[STATE_KEY] for s in ours))
    states = states_of({"internal_states": ours})
    return Sample(source, float(states[0].get("time", at)), states)


# ---------------------------------------------------------------------- /metrics

_OURS = re.compile(f"^{PREFIX.replace(':', '[:_]')}")
"""prometheus_client replaces colons when it is asked for OpenMetrics, as a Prometheus 2 asks."""


def from_metrics(source: str, text: str) -> list[State]:
    """The ranks' entries from Prometheus text; one forward counts under its first reason alone."""
    from prometheus_client.parser import text_string_to_metric_families

    try:
        found = [s for f in text_string_to_metric_families(text) for s in f.samples if _OURS.match(s.name)]
    except ValueError as error:
        raise ReportError(f"{source} is no Prometheus text ({error})") from None
    try:
        states = _from_samples(found)
    except (KeyError, ValueError, OverflowError) as error:
        what = f"{type(error).__name__}: {error}"
        raise ReportError(f"{source}: a {PREFIX}* series is damaged ({what}); fetch the document anew") from None
    if not states:
        raise ReportError(f"{source} has no {PREFIX}* series: the plugin is not active in this server, or older than its metrics")
    _check(source, states)
    return states


def _from_samples(found: Iterable[Any]) -> list[State]:
    """Raises KeyError, ValueError or OverflowError for labels and values that are not ours."""
    states: dict[tuple[int, int, int], State] = {}
    noes: dict[tuple[int, str], int] = defaultdict(int)
    for sample in found:
        labels, name, value = sample.labels, _OURS.sub("", sample.name), sample.value
        dp, tp, pp = (int(labels.get(f"{kind}_rank", 0)) for kind in ("dp", "tp", "pp"))
        state = states.setdefault((dp, tp, pp), _blank(dp, tp))
        bucket = labels.get("bucket", "")
        if name == "prefill_total":
            state["prefill"][labels["path"]] += int(value)
            if labels["path"] == "eager" and value:
                state["reasons"][labels["reason"]] = int(value)
        elif name == "tokens_total":
            state["tokens"][labels["kind"]] += int(value)
            state["bucket_tokens"].setdefault(bucket, {"real": 0, "padded": 0})[labels["kind"]] = int(value)
        elif name == "bucket_total" and value:
            state["buckets"][bucket] = int(value)
        elif name in ("capture_seconds", "capture_bytes"):
            what = name.removeprefix("capture_")
            taken = value if what == "seconds" else int(value)
            state["capture"].setdefault(bucket, {"seconds": None, "bytes": None})[what] = taken
        elif name == "vote_no_total" and value:
            # Every process that counts votes counts all of them.
            key = int(labels["rank"]), labels["reason"]
            noes[key] = max(noes[key], int(value))
        elif name == "vote_waiting_seconds":
            state["vote_waiting_seconds"] = value
    votes = [{"rank": rank, "reason": reason, "votes": n} for (rank, reason), n in sorted(noes.items())]
    for state in states.values():
        forwards = sum(state["prefill"].values())
        state["coverage"] = state["prefill"]["replay"] / forwards if forwards else None
        state["reasons"] = dict(sorted(state["reasons"].items(), key=lambda item: -item[1]))
        state["bucket_tokens"] = {b: t for b, t in state["bucket_tokens"].items() if b in state["buckets"]}
        state["votes_no"] = votes
    return [states[key] for key in sorted(states)]


def _blank(dp: int, tp: int) -> State:
    return {
        "rank": {"dp": dp, "tp": tp}, "prefill": {"replay": 0, "eager": 0}, "coverage": None, "reasons": {}, "votes_no": [],
        "tokens": {"real": 0, "padded": 0}, "buckets": {}, "bucket_tokens": {}, "capture": {}, "adapter_us": None,
        "vote_waiting_seconds": None,
    }  # fmt: skip


def _over_time(samples: list[Sample]) -> Report:
    samples = sorted(samples, key=lambda sample: sample.time)
    last = samples[-1]
    report = Report([s.source for s in samples], last.states, [])
    for before, after in pairwise(samples):
        if names(before.states) != names(after.states):
            raise ReportError(
                f"{before.source} has the ranks {', '.join(names(before.states))} and {after.source} "
                f"{', '.join(names(after.states))}: they are not one server over time"
            )
        for rank, old, new in zip(names(after.states), before.states, after.states, strict=True):
            more = {path: new["prefill"][path] - old["prefill"][path] for path in ("replay", "eager")}
            if min(more.values()) < 0:
                more = new["prefill"]
                report.notes.append(f"{rank} was started anew between {before.source} and {after.source}")
            if sum(more.values()):
                report.points.append(Point(rank, after.time, more["replay"], more["eager"]))
    return report


# ---------------------------------------------------------------------- logs

_STAMP = re.compile(r"^\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z]+\d+)*)\]")
_HOST = re.compile(r"Prefill batch.*? graph: (True|False)")
_SUMMARY = re.compile(r"sglang-bcg-dsa: ([1-9]\d*) prefills in the last [\d.]+ s, (\d+) replayed .*reasons: (.*)$")
_ZERO = re.compile(r"sglang-bcg-dsa: none of the first ([1-9]\d*) prefills replayed a graph\. Reasons: (.*)$")
_NOTED = re.compile(r"sglang-bcg-dsa: (prefill graphs: .*|capture of bucket \d+ failed.*|the group agreed.*|rank \d.*)$")


def _from_logs(logs: Sequence[tuple[str, str]]) -> Report:
    """Prefills from SGLang's line for each batch, or our summaries where those are missing; reasons from our lines."""
    host: dict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)
    ours: dict[tuple[int, int], list[tuple[float, int, int]]] = defaultdict(list)
    reasons: dict[tuple[int, int], dict[str, int]] = {}
    notes: dict[str, None] = {}
    for source, text in logs:
        known = False
        for line in text.splitlines():
            if not (stamp := _STAMP.match(line)):
                continue
            if noted := _NOTED.search(line):
                notes[noted.group(1)] = None
            try:
                at = datetime.strptime(stamp.group(1), "%Y-%m-%d %H:%M:%S").timestamp()
            except (ValueError, OverflowError):  # no time: another program's line
                continue
            rank = {name: int(n) for name, n in re.findall(r"([A-Z]+)(\d+)", stamp.group(2))}
            key = rank.get("DP", 0), rank.get("TP", 0)
            if found := _HOST.search(line):
                host[key].append((at, int(found.group(1) == "True"), int(found.group(1) == "False")))
            elif found := _SUMMARY.search(line):
                prefills, replayed = int(found.group(1)), int(found.group(2))
                ours[key].append((at, replayed, prefills - replayed))
                reasons[key] = {n: int(t) for n, t in re.findall(r"([a-z]\w*) (\d+)", found.group(3))}
            elif found := _ZERO.search(line):
                reasons.setdefault(key, {n: int(t) for n, t in re.findall(r"(?:^|; )([a-z]\w*) \((\d+)", found.group(2))})
                ours[key] = ours[key] or [(at, 0, int(found.group(1)))]
            else:
                continue
            known = True
        if not known:
            raise ReportError(
                f"{source}: no prefill in this log; expected SGLang's log at level info ('Prefill batch' lines, or "
                "sglang-bcg-dsa's summaries), or /server_info JSON, or /metrics text"
            )
    counted = {key: host.get(key) or ours[key] for key in sorted({*host, *ours})}
    states = []
    for key, rows in counted.items():
        state = _blank(*key)
        state["prefill"] = {"replay": sum(r[1] for r in rows), "eager": sum(r[2] for r in rows)}
        state["coverage"] = state["prefill"]["replay"] / sum(state["prefill"].values())
        state |= {"reasons": reasons.get(key, {}), "tokens": None, "buckets": None, "bucket_tokens": None, "capture": None}
        states.append(state)
    report = Report([source for source, _ in logs], states, [], list(notes))
    for name, rows in zip(report.ranks, counted.values(), strict=True):
        report.points += _binned(name, rows)
    report.notes.append("logs tell neither buckets nor padding nor capture: /server_info and /metrics do")
    return report


def _binned(rank: str, rows: Iterable[tuple[float, int, int]]) -> list[Point]:
    """At most :data:`_BINS` points of at least a second."""
    rows = sorted(rows)
    width = max(1.0, (rows[-1][0] - rows[0][0]) / _BINS)
    bins: dict[int, list[int]] = {}
    for at, replayed, eager in rows:
        counts = bins.setdefault(int((at - rows[0][0]) / width), [0, 0])
        counts[0] += replayed
        counts[1] += eager
    return [Point(rank, rows[0][0] + (i + 1) * width, *counts) for i, counts in sorted(bins.items())]
