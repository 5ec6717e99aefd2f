"""The dress rehearsal: SGLang's real server on this machine's CPU, with the plugin, twice.

Contract: the same seeded traffic goes to a server that replays prefill graphs (on the tape) and to
one that runs eagerly; tokens and log-probabilities must be equal bit for bit, something must have
replayed, and ``/metrics`` must say what ``/server_info`` says. A fault must be noticed and named.
Whatever happens, no process is left behind.

What it shows is correctness and agreement between ranks. It says nothing about speed on a GPU.
"""

from __future__ import annotations

import concurrent.futures
import math
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sglang_bcg_dsa import environment, traffic
from sglang_bcg_dsa.activate import host_name
from sglang_bcg_dsa.hooks.explain import states_of
from sglang_bcg_dsa.metrics import INTERVAL
from sglang_bcg_dsa.report import from_metrics
from sglang_bcg_dsa.rollcall import ANSWER_SECONDS
from sglang_bcg_dsa.testing import deep_ep_folder, dsa_folder, faults
from sglang_bcg_dsa.testing.models import VOCABULARY, ModelKind, write_model
from sglang_bcg_dsa.testing.server import ServerDied, ServerHandle, ServerSpec, logprobs, running_server, working_folder

Say = Callable[[str], None]

MIN_RANKS, MAX_RANKS = 2, 8
"""A vote needs two; each rank is a process of about 1.3 GB."""
LADDER = (16, 32, 64, 128)
CHUNK = 128
DSV4_LADDER, DSV4_TOKENS = (64, 128, 256, 512), 16384
"""Pages of 256 tokens: a prefix is cached by the page, and each request holds one at least. A chunk is the largest."""
NEW_TOKENS = 4
TAPE_FAULTS = ("skip-break", "drop-copy")
FAULTS = (*faults.FAULTS, *TAPE_FAULTS)
FAULT_RANK = 1
PASSES = ("graphs", "eager")
_REQUEST_SECONDS = 60.0
FAULT_CONFIG = "[audit]\nexchange_seconds = 5.0\nstall_seconds = 5.0\n"


class BadRequest(ValueError):
    """A rehearsal that cannot be set up as asked."""


@dataclass(frozen=True)
class Options:
    """What to rehearse."""

    ranks: int = 2
    requests: int = 24
    model: ModelKind = "dsa"
    fault: str = ""
    host_only: bool = False
    deepep: bool = False
    seed: int = 7
    config: str | None = None
    keep: Path | None = None

    @property
    def ladder(self) -> tuple[int, ...]:
        """The buckets; the last is also the chunked-prefill size."""
        return DSV4_LADDER if self.model == "dsv4" else LADDER

    def check(self) -> None:
        """Raise BadRequest for what cannot be rehearsed."""
        if not MIN_RANKS <= self.ranks <= MAX_RANKS:
            raise BadRequest(f"--ranks {self.ranks}: expected {MIN_RANKS} to {MAX_RANKS} (a vote needs two ranks)")
        if not 1 <= self.requests <= 10_000:
            raise BadRequest(f"--requests {self.requests}: expected 1 to 10000")
        if self.model not in get_args(ModelKind):
            raise BadRequest(f"--model {self.model}: expected one of {', '.join(get_args(ModelKind))}")
        if self.fault and self.fault not in FAULTS:
            raise BadRequest(f"--fault {self.fault}: expected one of {', '.join(FAULTS)}")
        if self.deepep and self.model == "dense":
            raise BadRequest("--deepep: the dense model has no experts; use --model dsa, dsv4, mla or moe")
        if self.fault in faults.FAULTS and self.host_only:
            raise BadRequest(f"--fault {self.fault} needs the plugin; drop --host-only")
        if self.keep is not None:
            try:
                self.keep.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise BadRequest(f"--keep {self.keep} cannot be created: {error.strerror}") from None


@dataclass
class Pass:
    """One server's answers and accounts."""

    name: str
    start_seconds: float = 0.0
    traffic_seconds: float = 0.0
    answers: list[tuple[list[int], list[float]]] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)
    host_replays: int = 0
    host_prefills: int = 0
    rows_crossed: list[int] = field(default_factory=list)
    metrics_problem: str | None = None


@dataclass
class Outcome:
    """What a rehearsal found. ``problems`` empty: all is well."""

    options: Options
    host: str
    waves: list[traffic.Wave]
    passes: list[Pass] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    compared: int = 0
    max_difference: float = 0.0
    coverage: float | None = None
    fault_seconds: float | None = None
    seconds: float = 0.0

    @property
    def status(self) -> Literal["equal", "failed", "unnoticed"]:
        """``unnoticed``: a fault was asked for, and nothing was wrong."""
        if self.options.fault and not self.problems:
            return "unnoticed"
        return "failed" if self.problems else "equal"


def rehearse(options: Options, say: Say = lambda text: None) -> Outcome:
    """Run it. Raises BadRequest; anything that goes wrong in a server is a problem in the outcome."""
    options.check()
    started = time.monotonic()
    outcome = Outcome(
        options,
        host_name(),
        traffic.waves(options.seed, options.requests, options.ranks, options.ladder, options.ladder[-1], VOCABULARY),
    )
    with working_folder(options.keep, "bcg-dsa-rehearsal-") as workdir:
        for name in PASSES:
            # A kept folder may hold an earlier run's, whose causes are not this run's.
            (workdir / f"{name}.log").unlink(missing_ok=True)
        try:
            outcome.passes.append(_serve(outcome, workdir, graphs=True, say=say))
            if options.fault not in faults.FAULTS:
                outcome.passes.append(_serve(outcome, workdir, graphs=False, say=say))
        except ServerDied as died:
            found = [workdir / f"{name}.log" for name in PASSES]
            logs = [path.read_text(errors="replace") for path in found if path.exists()]
            outcome.problems += _causes("\n".join([*logs, str(died)]))
        else:
            _judge(outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


# ---------------------------------------------------------------------- one server


def _serve(outcome: Outcome, workdir: Path, *, graphs: bool, say: Say) -> Pass:
    options = outcome.options
    done = Pass(PASSES[0] if graphs else PASSES[1])
    spec = spec_of(options, workdir, graphs)
    what = "with prefill graphs" if graphs else "eager"
    say(f"starting {outcome.host}, {options.ranks} ranks, {what} (about 30 s)")
    start = time.monotonic()
    with running_server(spec, workdir, done.name) as server:
        done.start_seconds = time.monotonic() - start
        say(f"up after {done.start_seconds:.0f} s; sending {options.requests} requests")
        start = time.monotonic()
        send(outcome, server, done, say)
        done.traffic_seconds = time.monotonic() - start
        info = server.server_info()
        done.states = states_of(info)
        done.rows_crossed = [s["deep_ep_gloo"]["rows_sent"] for s in info["internal_states"] if "deep_ep_gloo" in s]
        _count_host_lines(server.log(), done)
        if done.states:
            done.metrics_problem = _metrics_problem(server, done.states)
    return done


def _metrics_problem(server: ServerHandle, states: Sequence[dict[str, Any]]) -> str | None:
    """What ``/metrics`` says otherwise than ``/server_info``, once the last forwards must have got there; or None."""
    deadline = time.monotonic() + 5 * INTERVAL
    while True:
        metrics = {(s["rank"]["dp"], s["rank"]["tp"]): s for s in from_metrics("/metrics", server.metrics())}
        wrong = [
            f"/metrics of rank {state['rank']} says {key} {shown.get(key)}, /server_info {state[key]}"
            for state in states
            for shown in (metrics.get((state["rank"]["dp"], state["rank"]["tp"]), {}),)
            for key in ("prefill", "tokens", "buckets", "bucket_tokens", "votes_no")
            if shown.get(key) != state[key]
        ]
        if not wrong or time.monotonic() > deadline:
            return wrong[0] if wrong else None
        time.sleep(0.2)


def spec_of(options: Options, workdir: Path, graphs: bool) -> ServerSpec:
    """The server of one pass."""
    plugin_args: tuple[str, ...] = ()
    # The grouped top-k of 0.5.16 is compiled at its first call: 12 s on a CPU, in the first request.
    env: dict[str, str] = {"TORCHDYNAMO_DISABLE": "1"}
    path: tuple[Path, ...] = ()
    if options.deepep:
        deep_ep_folder.write_distribution(workdir / "deep_ep")
        path += (workdir / "deep_ep",)
    host_args: tuple[str, ...] = deep_ep_folder.SERVER_ARGS if options.deepep else ()
    if options.model == "dsv4" and options.deepep:
        host_args += dsa_folder.DSV4_DEEPEP_ARGS
    if options.model in ("dsa", "dsv4"):
        path += (dsa_folder.write_distribution(workdir / "dsa"),)
        host_args += dsa_folder.SERVER_ARGS if options.model == "dsa" else dsa_folder.DSV4_SERVER_ARGS
        env |= dsa_folder.SERVER_ENV if options.model == "dsa" else dsa_folder.DSV4_SERVER_ENV
    if graphs and not options.host_only:
        plugin_args = ("--plugins", "bcg_dsa")
        config = options.config
        if options.fault in faults.FAULTS:
            config = str(workdir / "fault.toml")
            Path(config).write_text(FAULT_CONFIG)
            path = (inject(env, workdir, options.fault, FAULT_RANK), *path)
        if config is not None:
            plugin_args += ("--bcg-dsa-config", str(Path(config).resolve()))
    return ServerSpec(
        model=write_model(workdir / "model", options.model),
        tp=options.ranks,
        dp=options.ranks,
        dp_attention=True,
        graphs=graphs,
        ladder=options.ladder,
        # SGLang divides it by the number of DP ranks.
        chunked_prefill_size=options.ladder[-1] * options.ranks,
        max_total_tokens=DSV4_TOKENS if options.model == "dsv4" else ServerSpec.max_total_tokens,
        fault=options.fault if graphs and options.fault in TAPE_FAULTS else "",
        extra_args=(*plugin_args, *host_args),
        env=env,
        python_path=path,
    )


def inject(env: dict[str, str], workdir: Path, *fault: object) -> Path:
    """Have a server show a fault (its name, rank and perhaps prefills before); the folder to put first on its path."""
    env[environment.FAULT] = "@".join(map(str, fault))
    faults.write_distribution(workdir / "fault")
    return workdir / "fault"


def send(outcome: Outcome, server: ServerHandle, done: Pass, say: Say, watch: Watch | None = None) -> None:
    """Send all waves; answers go into ``done``. Raises ServerDied when the server ends, with what is known of it."""
    ranks = outcome.options.ranks
    number = 0
    watch = watch or Watch(server)
    pool = ThreadPoolExecutor(max_workers=2 * ranks)
    try:
        for index, wave in enumerate(outcome.waves, 1):
            targets = [(number + i) % ranks for i in range(len(wave.prompts))]
            number += len(wave.prompts)
            began = time.monotonic()
            pending = [
                pool.submit(
                    server.generate, prompt, NEW_TOKENS, return_logprob=True, timeout=_REQUEST_SECONDS,
                    rank=target if ranks > 1 else None,
                )
                for prompt, target in zip(wave.prompts, targets, strict=True)
            ]  # fmt: skip
            try:
                watch.wait(pending)
                answers = [answer.result() for answer in pending]
            except (OSError, RuntimeError, ValueError) as error:
                for other in pending:
                    other.cancel()
                raise watch.explain(error, began, outcome) from error
            done.answers += [(list(got["output_ids"]), logprobs(got)) for got in answers]
            say(f"wave {index}/{len(outcome.waves)} ({wave.kind}): {len(done.answers)}/{outcome.options.requests} answered")
    finally:
        # Not waiting: after an interrupt the server is killed next, which ends what is under way.
        pool.shutdown(wait=False, cancel_futures=True)


class Watch:
    """Knows which process is which rank, and tells what ended a server."""

    def __init__(self, server: ServerHandle) -> None:
        self._server = server
        self.ranks: dict[int, int] = {pid: rank for pid in server.pids() if (rank := _rank_in_title(pid)) is not None}
        self._gone: list[int] = []

    def wait(self, requests: Sequence[Future[Any]]) -> None:
        """Wait for answers; RuntimeError as soon as a rank's process, or the server's, is gone.

        A client would wait for its time-out: the HTTP side lives on for a while without its ranks.
        """
        while concurrent.futures.wait(requests, timeout=0.5).not_done:
            if self._look():
                # Ranks that lost a peer need 2 s for their roll call; then all has been said.
                time.sleep(ANSWER_SECONDS + 1.0)
                raise RuntimeError("a process of the server ended while requests were under way")

    def _look(self) -> bool:
        alive = set(self._server.pids())
        if not self._gone:
            self._gone = [rank for pid, rank in self.ranks.items() if pid not in alive]
        return bool(self._gone) or self._server.process.poll() is not None

    def explain(self, error: Exception, began: float, outcome: Outcome) -> ServerDied:
        """Say which rank went first; the servers' logs say why."""
        self._look()
        outcome.fault_seconds = time.monotonic() - began
        lines = [f"a request failed: {error}"]
        if self._gone and len(self._gone) < len(self.ranks):
            lines.append(f"rank {', '.join(map(str, self._gone))}: its process was the first to be gone")
        return ServerDied("\n".join(lines))


def _rank_in_title(pid: int) -> int | None:
    """The TP rank in a scheduler's process title (``sglang::scheduler_DP1_TP1``)."""
    try:
        title = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    found = re.search(r"sglang::scheduler\S*?_TP(\d+)", title)
    return int(found.group(1)) if found else None


def _count_host_lines(log: str, done: Pass) -> None:
    """What SGLang's own log says of prefills: all it tells without the plugin."""
    found = re.findall(r"Prefill batch.*?graph: (True|False)", log)
    done.host_prefills, done.host_replays = len(found), found.count("True")


def _causes(log: str) -> list[str]:
    """What ended a server: our own words in its log, each once; failing that, the end of the log."""
    ours = re.compile(r"(?:sglang-bcg-dsa|sglang_bcg_dsa\.testing): (.*)|^(rank \d.* gone)$")
    routine = re.compile(
        r"^(on, |\d+ ranks agree|prefill graphs|prefill buckets|sparse attention is|\d+ MB set aside|--deepep-mode normal|"
        r"\d+ prefills in|none of the first)"
    )
    seen: dict[str, None] = {}
    for line in log.splitlines():
        found = ours.search(line)
        if found:
            text = (found.group(1) or found.group(2)).strip()
            if not routine.match(text):
                seen.setdefault(text, None)
    return list(seen) or ["the server ended:\n" + "\n".join(log.splitlines()[-20:])]


# ---------------------------------------------------------------------- judgement


def _judge(outcome: Outcome) -> None:
    graphs = outcome.passes[0]
    replay = sum(s["prefill"]["replay"] for s in graphs.states)
    prefills = replay + sum(s["prefill"]["eager"] for s in graphs.states)
    if outcome.options.host_only:
        replay, prefills = graphs.host_replays, graphs.host_prefills
    elif not graphs.states:
        outcome.problems.append("the plugin did not report under /server_info; it was not active")
    outcome.coverage = replay / prefills if prefills else None
    if graphs.metrics_problem:
        outcome.problems.append(graphs.metrics_problem)
    if not replay:
        outcome.problems.append("nothing was replayed: zero coverage, the comparison proves nothing")
    if outcome.options.deepep and not all(sum(done.rows_crossed) for done in outcome.passes):
        outcome.problems.append("no tokens crossed ranks through DeepEP's dispatcher")
    if len(outcome.passes) == 2:
        _compare(outcome)


def _compare(outcome: Outcome) -> None:
    graphs, eager = outcome.passes
    for number, (got, wanted) in enumerate(zip(graphs.answers, eager.answers, strict=True)):
        outcome.compared += 1
        difference = largest_difference(got[1], wanted[1])
        outcome.max_difference = max(outcome.max_difference, difference)
        if got[0] != wanted[0]:
            outcome.problems.append(f"request {number}: tokens {got[0]} with graphs, {wanted[0]} eager")
        elif difference:
            outcome.problems.append(f"request {number}: log-probabilities differ by up to {difference:g}")


def largest_difference(one: Sequence[float], other: Sequence[float]) -> float:
    """Largest absolute difference; infinite where lengths differ or only one is not a number."""
    if len(one) != len(other):
        return math.inf
    worst = 0.0
    for a, b in zip(one, other, strict=True):
        if math.isnan(a) or math.isnan(b):
            return math.inf
        worst = max(worst, abs(a - b))
    return worst


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome in builtin types."""
    options = outcome.options
    return {
        "status": outcome.status,
        "host": outcome.host,
        "model": options.model,
        "ranks": options.ranks,
        "requests": options.requests,
        "fault": options.fault or None,
        "host_only": options.host_only,
        "deepep": options.deepep,
        "problems": outcome.problems,
        "compared": outcome.compared,
        "max_logprob_difference": outcome.max_difference if math.isfinite(outcome.max_difference) else None,
        "coverage": outcome.coverage,
        "fault_noticed_after_seconds": outcome.fault_seconds,
        "seconds": round(outcome.seconds, 1),
        "passes": [
            {"name": p.name, "start_seconds": round(p.start_seconds, 1), "traffic_seconds": round(p.traffic_seconds, 1),
             "rows_crossed": p.rows_crossed, "ranks": p.states}
            for p in outcome.passes
        ],
    }  # fmt: skip


