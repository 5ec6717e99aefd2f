"""The real server on this machine's devices: the same traffic with prefill graphs and eager.

Contract: starts SGLang's own server with the caller's arguments, once with this plugin's graphs and
once without prefill graphs, and sends both the same seeded traffic over HTTP, in two ways.

*Alone*, one request after the other: what is computed is then known exactly. On a GPU an answer
depends on how many rows it was computed with, because kernels round by the row count, and a graph
runs the rows of its bucket. So the eager server gets each request in company of one that fills the
bucket, twice. Where eager gives the same both times, graphs must give that bit for bit.

*Together*, as clients do: no two runs group requests into the same batches, and one rank's batch
sets the bucket of all. Here graphs may differ from eager as far as eager, in company of random
size, differs from itself; at least ``MIN_COVERAGE`` of the prefills that graphs could serve replay;
nothing hangs. Whatever happens, no process is left behind.

What it does not show: speed. See ``bench``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sglang_bcg_dsa import traffic
from sglang_bcg_dsa.activate import host_name
from sglang_bcg_dsa.buckets import align_up, bucket_for
from sglang_bcg_dsa.hooks.explain import states_of
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.testing import weights
from sglang_bcg_dsa.testing.server import PACKAGE_ROOT, ServerDied, ServerHandle, logprobs, running_server, working_folder

Say = Callable[[str], None]
Answer = tuple[tuple[int, ...], tuple[float, ...]]
"""Generated tokens and their log-probabilities."""
Prompt = tuple[int, ...]
Answers = dict[Prompt, Answer]

MIN_COVERAGE = 0.95
MARGIN = 1.5
"""Differences of two samples of one distribution: the larger may exceed the smaller by this factor."""
NEW_TOKENS = 2
"""One from the prefill, one from a decode that reads what the prefill stored."""
_SHOWN = 5
_VOCABULARY = 2000
"""Token ids are drawn below it; every model has them."""
_REQUEST_SECONDS = 300.0
_OUTSIDE = frozenset({"above_ladder", "not_prefill"})
"""Reasons of prefills that no ladder would help: too large, or beside a rank that decodes (SGLang has no
graph for such a step with an all-to-all)."""


@dataclass(frozen=True)
class Limits:
    """What a server's batches are made by: ``chunk`` tokens at most, in pages of ``page``, padded as ``graphs`` say."""

    graphs: RunnerFacts
    chunk: int
    page: int

    def company(self, extend: int) -> int | None:
        """Tokens that fill the bucket of a prompt's last chunk, ``extend`` of its tokens not being cached.

        0 where none are needed: no bucket is large enough, or it would be mostly padding, and graphs are not used.
        None where the scheduler would not put them into one batch, or an earlier chunk is padded as well.
        """
        last = extend if extend <= self.chunk else extend % self.chunk or self.chunk
        if extend > self.chunk and self._bucket(self.chunk) != self.chunk:
            return None
        bucket = self._bucket(last)
        if bucket == last:
            return 0
        # The scheduler's budget counts whole pages.
        return bucket - last if align_up(last, self.page) + align_up(bucket - last, self.page) <= self.chunk else None

    def _bucket(self, tokens: int) -> int:
        """The rows that ``tokens`` are run with."""
        bucket = bucket_for(tokens, self.graphs.ladder)
        return tokens if bucket is None or self.graphs.pads_too_much(tokens) else bucket


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
    """``requests`` of each round; ``seed`` of traffic; ``start_timeout`` seconds (a first start compiles kernels)."""

    requests: int = 100
    seed: int = 7
    start_timeout: float = 900.0
    keep: Path | None = None

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
class Alone:
    """Requests sent alone. ``comparable``: eager had the bucket's rows, and gave the same twice."""

    comparable: int
    equal: int
    unequal: list[str]
    """The first few that differ: tokens, cached tokens, and by how much."""


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
    """Requests sent together: graphs against eager, eager against itself."""
    alone: Alone | None = None
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
                limits, waves = _look(outcome, server, options)
                say(f"up with graphs: {outcome.ranks} ranks, ladder {outcome.ladder}; sending {options.requests} requests")
                graphs = _together(server, waves, outcome.ranks)
                say("sending the same, one by one")
                alone = _alone(server, waves, outcome.ranks)
                outcome.states = states_of(server.server_info())
            judge(outcome)
            say(f"graphs answered; coverage {100 * (outcome.coverage or 0):.1f} %")
            with _timed(outcome, "eager"), running_server(spec("--disable-prefill-cuda-graph"), workdir, "eager") as server:
                say("up eager; sending the same, in company")
                chance = Chance(options.seed, outcome.ladder)
                eager = _together(server, waves, outcome.ranks)
                again = _together(server, waves, outcome.ranks, chance)
                filled = {prompt: limits.company(len(prompt) - got.cached) for prompt, got in alone.items()}
                rounds = [_alone(server, waves, outcome.ranks, chance, filled) for _ in range(2)]
        except (ServerDied, OSError, RuntimeError) as error:
            outcome.problems.append(f"a server failed (--keep DIR keeps its whole log): {error}")
            return outcome
        if options.keep is not None:
            _keep(workdir / "answers.json", graphs=graphs, eager=eager, again=again)
            _keep(workdir / "alone.json", graphs=alone, eager=rounds[0], again=rounds[1])
    outcome.graphs, outcome.eager = differences(graphs, eager), differences(again, eager)
    outcome.alone = exact(alone, rounds[0], rounds[1], filled)
    judge(outcome)
    return outcome


def _keep(path: Path, **rounds: Mapping[Prompt, tuple[Any, ...]]) -> None:
    path.write_text(json.dumps({name: [[p, *a] for p, a in answers.items()] for name, answers in rounds.items()}))


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


def _look(outcome: Outcome, server: ServerHandle, options: Options) -> tuple[Limits, list[traffic.Wave]]:
    """Ranks and limits of a running server, and traffic made for them."""
    info = server.server_info()
    states = states_of(info)
    if not states:
        raise RuntimeError("the plugin does not report under /server_info; it is not active in this server")
    outcome.ranks, outcome.requests = len(states), options.requests
    outcome.ladder = tuple(sorted(int(bucket) for bucket in states[0]["capture"]))
    if not outcome.ladder:
        raise RuntimeError("no prefill graph was captured; the server's log says why (look for 'prefill' there)")
    # Without our vote the host's rule holds, which is the default.
    graphs = RunnerFacts(outcome.ladder, **{f"padding_{name}": value for name, value in states[0].get("padding", {}).items()})
    if (chunk := int(info["chunked_prefill_size"])) <= 0:
        raise RuntimeError("chunked prefill is off: give --chunked-prefill-size above the largest bucket, traffic is made by it")
    limits = Limits(graphs, chunk, int(info["page_size"]))
    return limits, traffic.waves(options.seed, options.requests, outcome.ranks, outcome.ladder, limits.chunk, _VOCABULARY)


class Chance:
    """Makes prompts that requests are batched with."""

    def __init__(self, seed: int, ladder: Sequence[int]) -> None:
        self._random, self._ladder = random.Random(seed), ladder

    def prompt(self, length: int) -> Prompt:
        """``length`` tokens that no cache holds."""
        return tuple(self._random.randrange(5, _VOCABULARY) for _ in range(length))

    def company(self, tokens: int) -> Prompt:
        """Company for a prompt of ``tokens``: up to some bucket that holds it, as other requests and ranks bring it there."""
        above = [bucket - tokens for bucket in self._ladder if bucket > tokens]
        return self.prompt(self._random.choice(above) if above else self._random.randint(1, 8))


def _send(server: ServerHandle, prompts: Sequence[Prompt], new_tokens: int, rank: int | None) -> dict[str, Any]:
    """Send prompts in one HTTP call, so that the scheduler has all before it makes a batch; the first one's answer."""
    return server.generate_batch(prompts, new_tokens, return_logprob=True, timeout=_REQUEST_SECONDS, rank=rank)[0]


def _target(number: int, ranks: int) -> int | None:
    return number % ranks if ranks > 1 else None


def _together(server: ServerHandle, waves: Sequence[traffic.Wave], ranks: int, chance: Chance | None = None) -> Answers:
    """All waves, one after the other, on an empty cache. With ``chance`` each request comes with another."""
    server.flush_cache()
    answers: Answers = {}
    number = 0

    def one(prompts: Sequence[Prompt], rank: int | None) -> Answer:
        got = _send(server, prompts, NEW_TOKENS, rank)
        return tuple(got["output_ids"]), tuple(logprobs(got))

    with ThreadPoolExecutor(max_workers=4 * ranks) as pool:
        for wave in waves:
            pending = []
            for prompt in wave.prompts:
                sent = [prompt] if chance is None else [prompt, chance.company(len(prompt))]
                pending.append((prompt, pool.submit(one, sent, _target(number, ranks))))
                number += 1
            answers.update((prompt, answer.result()) for prompt, answer in pending)
    return answers


class Single(NamedTuple):
    """The one token of a request that was sent alone, its log-probability, and how much of its prompt was cached."""

    token: int
    logprob: float
    cached: int


def _alone(
    server: ServerHandle,
    waves: Sequence[traffic.Wave],
    ranks: int,
    chance: Chance | None = None,
    filled: Mapping[Prompt, int | None] | None = None,
) -> dict[Prompt, Single]:
    """All prompts, one after the other, on an empty cache, each in company of as many tokens as ``filled`` says."""
    server.flush_cache()
    answers: dict[Prompt, Single] = {}
    for number, prompt in enumerate(prompt for wave in waves for prompt in wave.prompts):
        company = filled[prompt] if filled else None
        sent = [prompt, chance.prompt(company)] if chance and company else [prompt]
        got = _send(server, sent, 1, _target(number, ranks))
        answers[prompt] = Single(got["output_ids"][0], logprobs(got)[0], int(got["meta_info"]["cached_tokens"]))
    return answers


def exact(
    graphs: Mapping[Prompt, Single],
    eager: Mapping[Prompt, Single],
    again: Mapping[Prompt, Single],
    filled: Mapping[Prompt, int | None],
) -> Alone:
    """Compare requests that were computed with the same rows, bit for bit; ``graphs`` in the order in which they were sent.

    What a request reads from the cache has to be comparable as well.
    """
    found = Alone(0, 0, [])
    doubtful: list[Prompt] = []
    for prompt, got in graphs.items():
        expected = eager[prompt]
        if (
            filled[prompt] is None or expected != again[prompt] or got.cached != expected.cached
            or (got.cached and any(prompt[: got.cached] == earlier[: got.cached] for earlier in doubtful))
        ):  # fmt: skip
            doubtful.append(prompt)
            continue
        found.comparable += 1
        if got == expected:
            found.equal += 1
        elif len(found.unequal) < _SHOWN:
            found.unequal.append(
                f"{len(prompt)} tokens ({got.cached} cached with graphs, {expected.cached} eager): token {got.token} against "
                f"{expected.token}, log-probability {got.logprob:.5g} against {expected.logprob:.5g}"
            )
    return found


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
    if not graphs.p90 <= MARGIN * itself.p90:
        outcome.problems.append(
            f"log-probabilities with graphs differ by {graphs.p90:.3g} (90 %), eager from itself by {itself.p90:.3g}"
        )
    if (alone := outcome.alone) is None:
        return
    if alone.unequal:
        outcome.problems.append(
            f"{alone.comparable - alone.equal} of {alone.comparable} requests sent alone have another answer with graphs than "
            f"eager with the same rows: {'; '.join(alone.unequal)}"
        )
    if 2 * alone.comparable < outcome.requests:
        outcome.problems.append(
            f"only {alone.comparable} of {outcome.requests} requests could be computed with the same rows eagerly, and "
            "gave the same twice: raise --chunked-prefill-size above the largest bucket"
        )


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome in builtin types."""
    return {
        **{name: value for name, value in vars(outcome).items() if name not in ("graphs", "eager", "alone")},
        "graphs": outcome.graphs and vars(outcome.graphs),
        "eager": outcome.eager and vars(outcome.eager),
        "alone": outcome.alone and vars(outcome.alone),
        "ladder": list(outcome.ladder),
    }
