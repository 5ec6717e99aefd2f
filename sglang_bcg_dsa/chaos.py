"""Chaos: what happens to one rank of a real server at a random moment, round after round.

Contract of a round: a server starts with graphs, gets the rehearsal's traffic, and one rank is killed,
stopped, stopped for a moment, slowed, made to disagree, to stall or to hang. Then either all answers
are those of the eager server, bit for bit, or requests end with an error; never another answer. A
fault that is none (a pause, a slow forward) changes nothing. Any other ends the server within
:data:`END_SECONDS`, by itself, with no process left, and its log names rank and cause. What breaks
this is a problem of the round; rounds never stop because of one.

The eager answers are made once: each round sends the same traffic, to an empty cache.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from sglang_bcg_dsa import traffic
from sglang_bcg_dsa.activate import host_name
from sglang_bcg_dsa.rehearse import (
    CHUNK,
    FAULT_CONFIG,
    LADDER,
    Options,
    Outcome,
    Pass,
    Say,
    Watch,
    inject,
    largest_difference,
    send,
    spec_of,
)
from sglang_bcg_dsa.testing import faults
from sglang_bcg_dsa.testing.models import VOCABULARY
from sglang_bcg_dsa.testing.server import ServerDied, ServerHandle, running_server, working_folder

END_SECONDS = 25.0
"""From a fault to the end of the server: the stall limit of 5 s, the report's few, and SGLang's own way down on a
machine with fewer cores than ranks."""
START_SECONDS = 900.0
PAUSE_SECONDS = 2.0
_MOMENTS = 6.0
"""A signal comes within this many seconds of the first request; the traffic takes about as long, and is repeated."""
_REPEATS = 6

# Kind: what the log has to say, with the rank filled in; nothing for what is no fault.
KINDS: dict[str, tuple[str, ...]] = {
    "kill": ("rank {0}",),
    "stop": ("rank {0} does not answer", "Rank {0} keeps the others waiting"),
    "pause": (),
    "slow": (),
    "disagree": ("DP rank {0}: the group agreed to replay", "replace_embeds"),
    "stall": ("Rank {0} keeps the others waiting", "report of rank {0}"),
    "spin": ("rank {0} does not answer", "Rank {0} keeps the others waiting"),
    "hang": ("Rank {0} keeps the others waiting", "a forward does not end", "report of rank {0}"),
}
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "pause": signal.SIGSTOP}


class Round(NamedTuple):
    """One round's plan."""

    number: int
    kind: str
    rank: int
    moment: float
    """Seconds after the first request, for signals."""
    prefills: int
    """Prefills that go well first, for other faults."""


@dataclass
class Chaos:
    """All rounds."""

    host: str
    seed: int
    rounds: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """In builtin types."""
        ends = [done["ended_after_seconds"] for done in self.rounds if done["ended_after_seconds"] is not None]
        return {
            "host": self.host,
            "seed": self.seed,
            "rounds": len(self.rounds),
            "kinds": dict(Counter(done["kind"] for done in self.rounds)),
            "answers_compared": sum(done["compared"] for done in self.rounds),
            "slowest_end_seconds": max(ends, default=None),
            "problems": self.problems,
            "seconds": round(self.seconds, 1),
            "each": self.rounds,
        }


def plans(seed: int, ranks: int) -> Callable[[], Round]:
    """An endless seeded sequence: every kind once in each eight rounds, in random order, on a random rank."""
    source, number = random.Random(seed), 0
    left: list[str] = []

    def following() -> Round:
        nonlocal left, number
        left = left or source.sample(sorted(KINDS), len(KINDS))
        number += 1
        return Round(number, left.pop(), source.randrange(ranks), source.uniform(0, _MOMENTS), source.randrange(6))

    return following


def run(options: Options, minutes: float, say: Say) -> Chaos:
    """Rounds for about ``minutes``, at least one. Raises BadRequest, and ServerDied where even eager fails."""
    options.check()
    start = time.monotonic()
    chaos, following = Chaos(host_name(), options.seed), plans(options.seed, options.ranks)
    waves = traffic.waves(options.seed, options.requests, options.ranks, LADDER, CHUNK, VOCABULARY)
    with working_folder(options.keep, "bcg-dsa-chaos-") as workdir:
        eager = Pass("eager")
        say(f"{chaos.host}: the eager answers first")
        spec = replace(spec_of(options, workdir, False), start_timeout=START_SECONDS)
        with running_server(spec, workdir, "eager") as server:
            send(Outcome(options, chaos.host, waves), server, eager, _quiet)
        while not chaos.rounds or time.monotonic() - start < 60 * minutes:
            plan = following()
            done = _round(options, plan, waves, eager, workdir)
            chaos.rounds.append(done)
            chaos.problems += [f"round {plan.number} ({plan.kind}, rank {plan.rank}): {text}" for text in done["problems"]]
            end = done["ended_after_seconds"]
            went = "answered" if end is None else f"ended after {end:.1f} s"
            came = "; ".join(done["problems"]) or "as it should be"
            say(f"round {plan.number}: {plan.kind} on rank {plan.rank}: {went}; {came}")
    chaos.seconds = time.monotonic() - start
    return chaos


def _quiet(text: str) -> None:
    return


class _Blow:
    """A signal to one rank, from a timer; knows when it came."""

    def __init__(self, plan: Round, pid: int) -> None:
        self.at: float | None = None
        self._plan, self._pid = plan, pid
        self._timer = threading.Timer(plan.moment, self._strike)
        self._timer.daemon = True

    def start(self) -> None:
        if self._plan.kind in _SIGNALS:
            self._timer.start()

    def _strike(self) -> None:
        os.kill(self._pid, _SIGNALS[self._plan.kind])
        self.at = time.monotonic()
        if self._plan.kind == "pause":
            time.sleep(PAUSE_SECONDS)
            os.kill(self._pid, signal.SIGCONT)

    def over(self) -> None:
        """Not to strike a process that is not the server's any more."""
        self._timer.cancel()


def _round(options: Options, plan: Round, waves: list[traffic.Wave], eager: Pass, workdir: Path) -> dict[str, Any]:
    name = f"round-{plan.number}"
    config = workdir / "chaos.toml"
    config.write_text(FAULT_CONFIG)
    spec = replace(spec_of(replace(options, fault="", config=str(config)), workdir, True), start_timeout=START_SECONDS)
    if plan.kind not in _SIGNALS:
        env = dict(spec.env)
        folder = inject(env, workdir, plan.kind, plan.rank, plan.prefills)
        spec = replace(spec, env=env, python_path=(folder, *spec.python_path))
    problems: list[str] = []
    compared, ended = 0, None
    try:
        with running_server(spec, workdir, name) as server:
            compared, ended = _traffic(options, plan, waves, eager, server, problems)
    except ServerDied as died:
        problems.append(f"the server did not start: {died}")
    log = workdir / f"{name}.log"
    if not problems and options.keep is None:
        log.unlink()
    return {**plan._asdict(), "compared": compared, "ended_after_seconds": ended, "problems": problems}


def _traffic(
    options: Options, plan: Round, waves: list[traffic.Wave], eager: Pass, server: ServerHandle, problems: list[str]
) -> tuple[int, float | None]:
    """Send the traffic until the fault has had its effect; (answers compared, seconds from fault to the server's end)."""
    watch, words = Watch(server), KINDS[plan.kind]
    blow = _Blow(plan, {rank: pid for pid, rank in watch.ranks.items()}[plan.rank])
    came = _Noted(server, blow)
    compared, died = 0, None
    blow.start()
    for _ in range(_REPEATS):
        done = Pass("graphs")
        try:
            send(Outcome(options, "", waves), server, done, _quiet, watch)
        except ServerDied as error:
            died = error
        compared += len(done.answers)
        for number, (got, wanted) in enumerate(zip(done.answers, eager.answers, strict=False)):
            if got[0] != wanted[0] or largest_difference(got[1], wanted[1]):
                problems.append(f"request {number}: another answer than eager's")
        if died is not None or came.when() is not None:
            break
        server.flush_cache()
    blow.over()
    if died is None:
        if words:
            problems.append("all was answered as if nothing had happened" if came.when() else "the fault never came")
        return compared, None
    if not words:
        problems.append(f"the server ended over what is no fault: {died}")
        return compared, None
    return compared, _ending(plan, server, came.when(), f"{server.log()}\n{died}", problems)


class _Noted:
    """When a fault came: from the timer, or as soon as the server's log says so."""

    def __init__(self, server: ServerHandle, blow: _Blow) -> None:
        self._blow, self._server, self._at = blow, server, None
        threading.Thread(target=self._look, daemon=True).start()

    _at: float | None

    def _look(self) -> None:
        while self._at is None and self._server.process.poll() is None:
            if faults.MARK in self._server.log():
                self._at = time.monotonic()
            time.sleep(0.2)

    def when(self) -> float | None:
        return self._blow.at or self._at


def _ending(plan: Round, server: ServerHandle, came: float | None, text: str, problems: list[str]) -> float | None:
    """Wait for the end of the server, all of it, and check its time and its words."""
    if came is None:
        problems.append(f"the server ended before its fault: {text[-2000:]}")
        return None
    while server.process.poll() is None and time.monotonic() - came < END_SECONDS:
        time.sleep(0.1)
    ended = time.monotonic() - came
    if server.process.poll() is None:
        problems.append(f"the server is still up {ended:.0f} s after its fault")
    patience = time.monotonic() + 5
    while (left := server.pids()[1:]) and time.monotonic() < patience:
        time.sleep(0.1)
    if left and server.process.poll() is not None:
        problems.append(f"{len(left)} processes are left by the server")
    missing = [word for word in (word.format(plan.rank) for word in KINDS[plan.kind]) if word not in text + server.log()]
    problems += [f"the log does not say {word!r}" for word in missing]
    return round(ended, 1)
