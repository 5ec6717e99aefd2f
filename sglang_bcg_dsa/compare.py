"""The real server on this machine's devices: the same traffic with prefill graphs, eager, and eager again.

Contract: starts SGLang's own server with the caller's arguments, once with this plugin's graphs and
once without prefill graphs, and sends both the same seeded traffic over HTTP. On a GPU an answer
depends on how many rows it was computed with, because kernels round by the row count, and a graph
runs the rows of its bucket. How much that is, the eager server itself shows: it gets the traffic
twice, the second time each request in company of one that fills its bucket. Graphs pass if they
differ from eager no more than eager differs from itself, replay at least ``MIN_COVERAGE`` of the
prefills that graphs could serve, and nothing hangs. Whatever happens, no process is left behind.

What it does not show: speed. See ``bench``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_bcg_dsa import traffic
from sglang_bcg_dsa.activate import host_name
from sglang_bcg_dsa.buckets import bucket_for
from sglang_bcg_dsa.hooks.explain import states_of
from sglang_bcg_dsa.testing import weights
from sglang_bcg_dsa.testing.server import PACKAGE_ROOT, ServerDied, ServerHandle, logprobs, running_server, working_folder

Say = Callable[[str], None]
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Generated tokens and their log-probabilities."""
Answers = dict[tuple[int, ...], Answer]
"""By prompt."""

MIN_COVERAGE = 0.95
MARGIN = 1.5
"""Differences of two samples of one distribution: the larger may exceed the smaller by this factor."""
NEW_TOKENS = 2
"""One from the prefill, one from a decode that reads what the prefill stored."""
_VOCABULARY = 2000
"""Token ids are drawn below it; every model has them."""
_REQUEST_SECONDS = 300.0
_OUTSIDE = frozenset({"above_ladder", "not_prefill"})
"""Reasons of prefills that no ladder would help: too large, or beside a rank that decodes (SGLang has no
graph for such a step with an all-to-all)."""


@dataclass(frozen=True)
class HostSpec:
    """A server of the caller's arguments, as ``running_server`` wants it."""

    args: tuple[str, ...]
    python_path: tuple[Path, ...]
    start_timeout: float

    def command(self, port: int) -> list[str]:
        """The command line."""
        return [
            sys.executable, "-m", "sglang.launch_server", *self.args, "--skip-server-warmup",
            "--host", "127.0.0.1", "--port", str(port),
        ]  # fmt: skip

    def environment(self, metadata: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """The caller's, and where our packages are."""
        path = [*map(str, self.python_path), str(PACKAGE_ROOT), inherited.get("PYTHONPATH", "")]
        return {**inherited, "PYTHONPATH": os.pathsep.join(p for p in path if p), "PYTHONUNBUFFERED": "1"}


@dataclass(frozen=True)
class Options:
    """``requests`` of each round; ``seed`` of traffic; ``start_timeout`` seconds (a first start compiles kernels).

    ``eager``: the ``eager.json`` that an earlier run of the same traffic kept, instead of a server.
    """

    requests: int = 100
    seed: int = 7
    start_timeout: float = 900.0
    keep: Path | None = None
    eager: Path | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.requests <= 100_000:
            raise ValueError(f"--requests {self.requests}: expected 1 to 100000")


@dataclass
class Differences:
    """How two rounds of the same requests differ."""

    tokens: int
    """Requests with other tokens."""
    median: float
    p90: float
    largest: float
    """Log-probabilities of tokens up to the first that differs, worst of each request."""


@dataclass
class Outcome:
    """``problems`` empty: all is well."""

    host: str
    ranks: int = 0
    ladder: tuple[int, ...] = ()
    requests: int = 0
    states: list[dict[str, Any]] = field(default_factory=list)
    coverage: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    graphs: Differences | None = None
    eager: Differences | None = None
    equal: int | None = None
    """Requests whose answer with graphs is bit for bit that of one of the eager rounds."""
    problems: list[str] = field(default_factory=list)


def compare(options: Options, host_args: Sequence[str], say: Say = lambda text: None) -> Outcome:
    """Run it. What goes wrong in a server is a problem in the outcome."""
    outcome = Outcome(host_name())
    with working_folder(options.keep, "bcg-dsa-compare-") as workdir:
        python_path: tuple[Path, ...] = ()
        if _flag(host_args, "--load-format") == "dummy":
            # SGLang's own dummies vanish in rounding: then everything is equal.
            weights.write_distribution(workdir / "weights")
            python_path = (workdir / "weights",)
        plugin = ("--plugins", "bcg_dsa") if _flag(host_args, "--plugins") is None else ()

        def spec(*more: str) -> HostSpec:
            return HostSpec((*host_args, *more), python_path, options.start_timeout)

        try:
            with _timed(outcome, "graphs"), running_server(spec(*plugin), workdir, "graphs") as server:
                waves = _look(outcome, server, options)
                say(f"up with graphs: {outcome.ranks} ranks, ladder {outcome.ladder}; sending {options.requests} requests")
                graphs = _send(server, waves, outcome.ranks)
                outcome.states = states_of(server.server_info())
            judge(outcome)
            say(f"graphs answered; coverage {100 * (outcome.coverage or 0):.1f} %")
            signature = [_flag(host_args, "--model-path"), outcome.ranks, zlib.crc32(repr(waves).encode())]
            if options.eager is not None:
                eager, again = _reuse(options.eager, signature)
            else:
                with _timed(outcome, "eager"), running_server(spec("--disable-prefill-cuda-graph"), workdir, "eager") as server:
                    say("up eager; sending the same, twice")
                    eager = _send(server, waves, outcome.ranks)
                    server.flush_cache()
                    again = _send(server, waves, outcome.ranks, company=Company(options.seed, outcome.ladder))
                _keep(workdir / "eager.json", signature, eager, again)
        except (ServerDied, OSError, RuntimeError) as error:
            outcome.problems.append(f"a server failed (--keep DIR keeps its whole log): {error}")
            return outcome
    outcome.graphs, outcome.eager = differences(graphs, eager), differences(again, eager)
    outcome.equal = sum(answer in (eager[prompt], again[prompt]) for prompt, answer in graphs.items())
    judge(outcome)
    return outcome


def _keep(path: Path, signature: list[Any], *rounds: Answers) -> None:
    kept = [[[list(prompt), list(ids), list(logs)] for prompt, (ids, logs) in answers.items()] for answers in rounds]
    path.write_text(json.dumps({"signature": signature, "rounds": kept}))


def _reuse(path: Path, signature: list[Any]) -> tuple[Answers, Answers]:
    """Both eager rounds of an earlier run. Raises RuntimeError where the traffic was another."""
    kept = json.loads(path.read_text())
    if kept["signature"] != signature:
        raise RuntimeError(
            f"{path} holds answers of another model, or to other traffic: {kept['signature']}, this is {signature}"
        )
    eager, again = ({tuple(p): (tuple(ids), tuple(logs)) for p, ids, logs in answers} for answers in kept["rounds"])
    return eager, again


class _timed:
    """Seconds of one server's life, under its name in the outcome."""

    def __init__(self, outcome: Outcome, name: str) -> None:
        self._seconds, self._name = outcome.seconds, name

    def __enter__(self) -> None:
        self._start = time.monotonic()

    def __exit__(self, *exc: object) -> None:
        self._seconds[self._name] = round(time.monotonic() - self._start, 1)


def _flag(args: Sequence[str], name: str) -> str | None:
    """The value of a flag among arguments, in either spelling; None where it is not given."""
    for index, word in enumerate(args):
        if word == name:
            return args[index + 1] if index + 1 < len(args) else ""
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _look(outcome: Outcome, server: ServerHandle, options: Options) -> list[traffic.Wave]:
    """Ranks, ladder and chunk of a running server, and traffic made for them."""
    info = server.server_info()
    states = states_of(info)
    if not states:
        raise RuntimeError("the plugin does not report under /server_info; it is not active in this server")
    outcome.ranks, outcome.requests = len(states), options.requests
    outcome.ladder = tuple(sorted(int(bucket) for bucket in states[0]["capture"]))
    if not outcome.ladder:
        raise RuntimeError("no prefill graph was captured; the server's log says why (look for 'prefill' there)")
    chunk = int(info["chunked_prefill_size"])
    return traffic.waves(options.seed, options.requests, outcome.ranks, outcome.ladder, chunk, _VOCABULARY)


class Company:
    """Makes the prompt that a request is batched with: as long as fills the request's bucket, else a few tokens."""

    def __init__(self, seed: int, ladder: Sequence[int]) -> None:
        self._random, self._ladder = random.Random(seed), ladder

    def to(self, prompt: Sequence[int]) -> tuple[int, ...]:
        """Company for ``prompt``."""
        bucket = bucket_for(len(prompt), self._ladder)
        length = (bucket or 0) - len(prompt)
        return tuple(self._random.randrange(5, _VOCABULARY) for _ in range(length if length > 0 else self._random.randint(1, 8)))


def _send(
    server: ServerHandle, waves: Sequence[traffic.Wave], ranks: int, *, company: Company | None = None
) -> Answers:
    """All waves, one after the other; answers by prompt. With ``company`` each request comes with another."""
    answers: Answers = {}
    number = 0

    def one(prompt: tuple[int, ...], rank: int, other: tuple[int, ...] | None) -> Answer:
        target = {"data_parallel_rank": rank} if ranks > 1 else {}
        # One HTTP call, so that the scheduler has both before it makes a batch.
        got = server.generate_batch(
            [prompt] if other is None else [prompt, other], NEW_TOKENS, return_logprob=True, timeout=_REQUEST_SECONDS, **target
        )[0]
        return tuple(got["output_ids"]), tuple(logprobs(got))

    with ThreadPoolExecutor(max_workers=4 * ranks) as pool:
        for wave in waves:
            pending = []
            for prompt in wave.prompts:
                pending.append((prompt, pool.submit(one, prompt, number % ranks, company.to(prompt) if company else None)))
                number += 1
            answers.update((prompt, answer.result()) for prompt, answer in pending)
    return answers


def differences(one: Answers, other: Answers) -> Differences:
    """Compare answers to the same prompts."""
    worst, tokens = [], 0
    for prompt, (ids, probabilities) in one.items():
        ids2, probabilities2 = other[prompt]
        same = next((i for i, (a, b) in enumerate(zip(ids, ids2, strict=True)) if a != b), len(ids))
        tokens += same < len(ids)
        pairs = zip(probabilities[: same + 1], probabilities2[: same + 1], strict=True)
        worst.append(max(abs(a - b) if a == a and b == b else float("inf") for a, b in pairs))
    worst.sort()
    return Differences(tokens, worst[len(worst) // 2], worst[len(worst) * 9 // 10], worst[-1])


def judge(outcome: Outcome) -> None:
    """Fill in coverage and problems, as far as there are answers."""
    outcome.problems.clear()
    replay = sum(s["prefill"]["replay"] for s in outcome.states)
    eager = sum(s["prefill"]["eager"] for s in outcome.states)
    outside = sum(times for s in outcome.states for name, times in s["reasons"].items() if name in _OUTSIDE)
    inside = replay + eager - outside
    outcome.coverage = replay / inside if inside > 0 else None
    if outcome.coverage is None or outcome.coverage < MIN_COVERAGE:
        outcome.problems.append(
            f"coverage of the prefills that graphs could serve is {100 * (outcome.coverage or 0):.1f} %, expected at least "
            f"{100 * MIN_COVERAGE:.0f} %"
        )
    graphs, itself = outcome.graphs, outcome.eager
    if graphs is None or itself is None:
        return
    allowed = MARGIN * itself.tokens + 0.02 * outcome.requests * (itself.tokens > 0)
    if graphs.tokens > allowed:
        outcome.problems.append(
            f"{graphs.tokens} of {outcome.requests} requests have other tokens with graphs; eager against itself "
            f"{itself.tokens}"
        )
    for name in ("median", "p90"):
        found, spread = getattr(graphs, name), getattr(itself, name)
        if not found <= MARGIN * spread:
            outcome.problems.append(
                f"log-probabilities with graphs differ by {found:.3g} ({name}), eager from itself by {spread:.3g}"
            )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome in builtin types."""
    return {
        **{name: value for name, value in vars(outcome).items() if name not in ("graphs", "eager")},
        "graphs": outcome.graphs and vars(outcome.graphs),
        "eager": outcome.eager and vars(outcome.eager),
        "ladder": list(outcome.ladder),
    }
