"""Tables and progress for people. Everything here can be had as JSON instead."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from sglang_bcg_dsa import __version__
from sglang_bcg_dsa.reasons import meaning

if TYPE_CHECKING:
    from sglang_bcg_dsa.activate import Plan
    from sglang_bcg_dsa.compare import Outcome as Comparison
    from sglang_bcg_dsa.doctor import Part
    from sglang_bcg_dsa.rehearse import Outcome
    from sglang_bcg_dsa.report import Report

# Logs and pipes get wide lines; a terminal its own width.
out = Console(highlight=False, width=None if sys.stdout.isatty() else 132)
err = Console(stderr=True, highlight=False, soft_wrap=True)
_start = time.monotonic()


def progress(text: str) -> None:
    """One line of progress, with the seconds since the command began."""
    err.print(Text(f"[{time.monotonic() - _start:5.0f} s] {text}", style="dim"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def doctor(decided: Plan, found: list[Part], refusal: str | None) -> None:
    """The report of ``doctor``."""
    from sglang_bcg_dsa.doctor import STYLES, third_party
    from sglang_bcg_dsa.records import State
    from sglang_bcg_dsa.seams import SEAMS

    keys = {s.key for s in SEAMS}
    fitting = sum(key in decided.seams for key in keys)
    needless = len(keys) - fitting - len(decided.seams.mismatches)
    out.print(Text(f"sglang-bcg-dsa {__version__} on {decided.host}", style="bold"))
    out.print()
    features = _table("Features", "feature", "state", "why")
    for feature in decided.features:
        features.add_row(feature.name, Text(feature.state.value, style=STYLES[feature.state]), Text(feature.reason))
    out.print(features)
    out.print()
    seams = _table(
        f"Seams: {fitting} of {len(keys)} fit this host" + (f", {needless} only other hosts have" if needless else ""),
        "feature", "seam", "found",
    )
    for mismatch in decided.seams.mismatches:
        seams.add_row(mismatch.feature, mismatch.key, Text(str(mismatch), style="red"))
    out.print(seams if decided.seams.mismatches else Text(str(seams.title), style="bold"))
    out.print()
    plugins = _table("Third-party plugins", "plugin", "hooks")
    for name, hooks in third_party(decided):
        plugins.add_row(name, ", ".join(hooks))
    if plugins.row_count:
        out.print(plugins)
        out.print()
    parts = _table("Parts", "part", "installed", "without it")
    for part in found:
        missing = Text("not found", style="yellow")
        parts.add_row(part.name, part.found or missing, Text("" if part.found else part.without))
    out.print(parts)
    out.print()
    if refusal is None:
        off = all(f.state is State.OFF for f in decided.features)
        good = "Every feature is switched off." if off else "Every feature that was asked for fits this SGLang."
        if any(part.name == "GPU" and not part.found for part in found):
            good += " There is no GPU here to serve on."
        out.print(Text(good, style="green"))
    else:
        out.print(Text(refusal, style="red"))


def rehearsal(outcome: Outcome) -> None:
    """The report of ``rehearse``."""
    options = outcome.options
    what = "host only" if options.host_only else f"with sglang-bcg-dsa {__version__}"
    out.print(Text(f"Rehearsal of {outcome.host} {what}: {options.ranks} DP ranks, model {options.model}", style="bold"))
    out.print()
    if outcome.passes and outcome.passes[0].states:
        _ranks(outcome.passes[0].states)
        _reasons(outcome.passes[0].states)
        _buckets(outcome.passes[0].states)
    if not outcome.passes:
        out.print(Text("No pass was completed.", style="dim"))
    times = _table("Passes", "pass", "start s", "traffic s", *(["rows that crossed ranks"] if options.deepep else []))
    for done in outcome.passes:
        crossed = [", ".join(map(str, done.rows_crossed))] if options.deepep else []
        times.add_row(done.name, f"{done.start_seconds:.1f}", f"{done.traffic_seconds:.1f}", *crossed)
    out.print(times)
    out.print()
    for problem in outcome.problems[:12]:
        out.print(Text(f"- {problem}", style="red"))
    if len(outcome.problems) > 12:
        out.print(Text(f"- and {len(outcome.problems) - 12} more", style="red"))
    out.print(Text(verdict(outcome), style="green" if outcome.status == "equal" else "red"))


def verdict(outcome: Outcome) -> str:
    """The last line."""
    took = f"{outcome.seconds:.0f} s"
    if outcome.options.fault:
        if outcome.status == "unnoticed":
            return f"The fault {outcome.options.fault!r} went unnoticed ({took})."
        after = f", {outcome.fault_seconds:.1f} s after the request that met it" if outcome.fault_seconds else ""
        return f"The fault {outcome.options.fault!r} was noticed{after} ({took} in all)."
    if outcome.status == "failed":
        return f"Failed: {len(outcome.problems)} problem(s) ({took})."
    coverage = "unknown" if outcome.coverage is None else f"{100 * outcome.coverage:.1f} %"
    return (
        f"Equal: {outcome.compared} of {outcome.compared} requests have the same tokens and log-probabilities, bit for "
        f"bit, with graphs and eager; coverage {coverage} ({took})."
    )


def _ranks(states: list[dict[str, Any]]) -> None:
    table = _table(
        "Prefills by rank", "rank", "replayed", "eager", "coverage", "real tokens", "padding", "adapter us", "capture s"
    )
    for state in states:
        real, padded = state["tokens"]["real"], state["tokens"]["padded"]
        table.add_row(
            f"DP{state['rank']['dp']}",
            str(state["prefill"]["replay"]),
            str(state["prefill"]["eager"]),
            _percent(state["coverage"]),
            str(real),
            f"{100 * padded / (real + padded):.0f} %" if real + padded else "",
            str(state["adapter_us"]["median"]),
            f"{sum(c['seconds'] for c in state['capture'].values()):.1f}",
        )
    out.print(table)
    out.print()


def _reasons(states: list[dict[str, Any]]) -> None:
    table = _table("Why not: votes against, by rank", "rank", "reason", "votes", "meaning")
    # Every rank has seen every vote; the first one's account is the group's.
    for row in states[0]["votes_no"]:
        table.add_row(f"DP{row['rank']}", row["reason"], str(row["votes"]), Text(meaning(row["reason"])))
    if not states[0]["votes_no"]:
        table.add_row("", "none", "", "")
    out.print(table)
    out.print()


def _buckets(states: list[dict[str, Any]]) -> None:
    table = _table("Buckets", "tokens", *[f"replays DP{s['rank']['dp']}" for s in states], "capture s")
    for bucket, captured in states[0]["capture"].items():
        table.add_row(bucket, *[str(s["buckets"].get(bucket, 0)) for s in states], f"{captured['seconds']:.2f}")
    out.print(table)
    out.print()


def bench(measured: dict[str, Any]) -> None:
    """The tables of ``bench``."""
    env = measured["environment"]
    out.print(Text(f"{env['cards']} x {env['card']}, driver {env['driver']}, CUDA {env['cuda']}, SGLang "
                   f"{env.get('sglang', '?')}, sglang-bcg-dsa {env['plugin']}, {env['date']}", style="bold"))  # fmt: skip
    if measured.get("check"):
        names = ("spread", "batching", "difference", "difference_full")
        table = _table("\nLargest difference of logits, same inputs", "requests", "std of logits", "eager, again",
                       "eager, batched", "graphs, eager", "graphs, eager batched", "tokens differ")  # fmt: skip
        for case in measured["check"]:
            differences = (f"{case[name]:.3g}" if name in case else "-" for name in names)
            tokens = f"{case['eager_tokens_differ']} eager, {case.get('tokens_differ', '-')} graphs"
            requests = (f"{case['prefix']}/" if case.get("prefix") else "") + "+".join(map(str, case["lengths"]))
            table.add_row(requests, f"{case['scale']:.3g}", *differences, tokens)
        out.print(table)
    table = _table("\nOne prefill forward, slowest rank: median (10 % .. 90 %) in ms", "tokens a rank", "eager GPU", "graphs GPU",
                   "ratio", "eager wall", "graphs wall", "ratio")  # fmt: skip
    for row in measured.get("time", ()):
        cells = [str(row["tokens"])]
        for clock in ("gpu_ms", "wall_ms"):
            cells += [_milliseconds(row[kind][clock]) if kind in row else "-" for kind in ("eager", "graphs")]
            cells.append(f"{row['ratio'][clock]:.2f}" if "ratio" in row else "-")
        table.add_row(*cells)
    out.print(table)
    if measured.get("split"):
        table = _table("\nWhere a replay's time goes, rank 0 (per replay)", "tokens", "part", "calls", "GPU ms", "CPU ms")
        for row in measured["split"]:
            for name, part in row["parts"].items():
                table.add_row(str(row["tokens"]), name, f"{part['calls']:.0f}", f"{part['gpu_ms']:.2f}", f"{part['cpu_ms']:.2f}")
        out.print(table)
    if measured.get("refresh"):
        table = _table("\nRefresh of captured metadata for one replay, ms, rank 0", "tokens", "SGLang's", "the plugin's", "ratio",
                       "waits")  # fmt: skip
        for row in measured["refresh"]:
            table.add_row(str(row["tokens"]), _milliseconds(row["host"]), _milliseconds(row["plugin"]), f"{row['ratio']:.2f}",
                          "yes" if row["syncs"] else "no")  # fmt: skip
        out.print(table)
    for row in measured.get("profile", ()):
        table = _table(f"\nPython in a replay of {row['tokens']} tokens, rank 0 (per replay, slowed by the profiler)",
                       "function", "calls", "own ms", "all ms")  # fmt: skip
        for part in row["functions"]:
            table.add_row(part["function"], f"{part['calls']:.0f}", f"{part['own_ms']:.3f}", f"{part['all_ms']:.3f}")
        out.print(table)
    capture = measured.get("capture")
    if capture is not None:
        out.print(
            f"\nCapture of {len(capture['buckets'])} buckets: {capture['seconds']:.1f} s, {capture['bytes'] / 2**30:.2f} GiB, "
            f"of which torch's allocator {capture['torch_bytes'] / 2**30:.2f} GiB"
            + (f", for graphs alone {capture['graph_bytes'] / 2**30:.2f} GiB" if "graph_bytes" in capture else "")
        )
        table = _table("", "bucket", "seconds", "GiB", "torch GiB", "graphs GiB")
        for row in capture["buckets"]:
            gibibytes = (f"{row[k] / 2**30:.3f}" if k in row else "-" for k in ("bytes", "torch_bytes", "graph_bytes"))
            table.add_row(str(row["bucket"]), f"{row['seconds']:.2f}", *gibibytes)
        out.print(table)
    if any("peak_bytes" in row.get(kind, {}) for row in measured.get("time", ()) for kind in ("eager", "graphs")):
        table = _table("\nDevice memory that one forward allocates, GiB, worst rank", "tokens", "eager", "beside its graphs")
        for row in measured["time"]:
            peaks = (row.get(kind, {}).get("peak_bytes") for kind in ("eager", "graphs"))
            table.add_row(str(row["tokens"]), *("-" if peak is None else f"{peak / 2**30:.3f}" for peak in peaks))
        out.print(table)


def _milliseconds(found: dict[str, float]) -> str:
    return f"{found['median']:.2f} ({found['p10']:.2f} .. {found['p90']:.2f})"


def comparison(outcome: Comparison) -> None:
    """The report of ``compare``."""
    if not outcome.ranks:
        for problem in outcome.problems:
            err.print(Text(problem))
        return
    out.print(Text(f"{outcome.host} with sglang-bcg-dsa {__version__}: {outcome.ranks} ranks, {outcome.requests} requests, "
                   f"ladder {', '.join(map(str, outcome.ladder))}", style="bold"))  # fmt: skip
    table = _table("\nPrefills by rank", "rank", "replayed", "eager", "why eager")
    for state in outcome.states:
        why = ", ".join(f"{name} {times}" for name, times in state["reasons"].items()) or "-"
        table.add_row(f"DP{state['rank']['dp']}", str(state["prefill"]["replay"]), str(state["prefill"]["eager"]), why)
    out.print(table)
    table = _table("\nSent together, against eager", "round", "other tokens", "log-probabilities: median", "90 %", "largest")
    for name, found in (("graphs", outcome.graphs), ("eager, in company", outcome.eager)):
        if found is not None:
            table.add_row(name, str(found.tokens), f"{found.median:.3g}", f"{found.p90:.3g}", f"{found.largest:.3g}")
    out.print(table)
    if (alone := outcome.alone) is not None:
        out.print(f"\nSent alone, eager with as many rows: {alone.equal} of {alone.comparable} equal bit for bit "
                  f"({outcome.requests - alone.comparable} not comparable).")  # fmt: skip
    if outcome.coverage is not None:
        seconds = ", ".join(f"{name} {taken:.0f} s" for name, taken in outcome.seconds.items())
        out.print(f"\nCoverage of the prefills that graphs could serve: {100 * outcome.coverage:.1f} % ({seconds})")
    for problem in outcome.problems:
        out.print(Text(problem, style="red"))
    if not outcome.problems:
        out.print(Text("Graphs answer as eager does.", style="green"))


def chaos(found: dict[str, Any]) -> None:
    """The report of ``rehearse --chaos``; ``found``: its JSON."""
    out.print(Text(f"{found['host']}: {found['rounds']} rounds in {found['seconds']:.0f} s, seed {found['seed']}", style="bold"))
    table = _table("\nRounds", "what happened to a rank", "rounds", "slowest end s")
    for kind, rounds in sorted(found["kinds"].items()):
        ends = [r["ended_after_seconds"] for r in found["each"] if r["kind"] == kind and r["ended_after_seconds"] is not None]
        table.add_row(kind, str(rounds), f"{max(ends):.1f}" if ends else "-")
    out.print(table)
    for problem in found["problems"]:
        out.print(Text(problem, style="red"))
    out.print(f"\n{len(found['problems'])} problems; {found['answers_compared']} answers compared.")


def report(found: Report) -> None:
    """The tables of ``report``. What a source does not tell is left out."""
    rank = "rank" if len(found.ranks) == 1 else "ranks"
    samples = f", {len(found.sources)} samples" if len(found.sources) > 1 else ""
    out.print(Text(f"Prefills of {found.sources[0]}{samples}: {len(found.ranks)} {rank}, coverage {_percent(found.coverage)}",
                   style="bold"))  # fmt: skip
    told = found.states[0]["tokens"] is not None
    waits = any((s.get("vote_waiting_seconds") or 0) > 1 for s in found.states)
    table = _table("\nCoverage by rank", "rank", "replayed", "eager", "coverage",
                   *(["real tokens", "padding"] if told else []), *(["last vote"] if waits else []))  # fmt: skip
    for name, state in zip(found.ranks, found.states, strict=True):
        cells = [name, str(state["prefill"]["replay"]), str(state["prefill"]["eager"]), _percent(state["coverage"])]
        if told:
            cells += [str(state["tokens"]["real"]), _share(state["tokens"]["padded"], state["tokens"]["real"])]
        if waits:
            cells.append(f"{state.get('vote_waiting_seconds') or 0:.0f} s ago")
        table.add_row(*cells)
    out.print(table)
    table = _table("\nWhy not, all ranks", "reason", "eager prefills", "refused by (votes)", "meaning")
    for name, by in {**{reason: {} for reason in found.reasons}, **found.refusals}.items():
        votes = sorted(by.items(), key=lambda item: -item[1])
        shown = ", ".join(f"DP{rank} ({n})" for rank, n in votes[:6]) + (f", {len(votes) - 6} more" if len(votes) > 6 else "")
        table.add_row(name, str(found.reasons.get(name, "-")), shown or "-", Text(meaning(name)))
    unsaid = "these sources do not say." if found.eager else "no prefill ran eagerly."
    out.print(table if table.row_count else f"\nWhy not: {unsaid}")
    if advice := found.advice():
        out.print(Text(f"\n{advice}", style="yellow"))
    if buckets := found.by_bucket():
        table = _table("\nBuckets, all ranks", "tokens", "replays", "real tokens", "padding", "capture s", "capture MB")
        for size, row in buckets.items():
            seconds = "-" if row["seconds"] is None else f"{row['seconds']:.2f}"
            taken = "-" if row["bytes"] is None else f"{row['bytes'] / 1e6:.1f}"
            table.add_row(str(size), str(row["replays"]), str(row["real"]), _share(row["padded"], row["real"]), seconds, taken)
        out.print(table)
    for note in found.notes:
        out.print(Text(f"\n{note}", style="dim"))


def _percent(share: float | None) -> str:
    return "none" if share is None else f"{100 * share:.1f} %"


def _share(padded: int, real: int) -> str:
    return f"{100 * padded / (real + padded):.0f} %" if real + padded else "-"
