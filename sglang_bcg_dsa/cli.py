"""Console script ``sglang-bcg-dsa``: ``doctor``, ``rehearse``, ``bench``, ``compare``, ``report``, ``dashboards``.

Contract: results on standard output (with ``--json`` nothing else), progress and errors on
standard error. Exit status 0: all is well; 1: something is wrong, or a fault was noticed as it
should be; 2: bad input; 3: a fault went unnoticed. No traceback unless ``--debug`` asks for one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import signal
import sys
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from sglang_bcg_dsa import __version__, environment
from sglang_bcg_dsa.errors import StartupError

if TYPE_CHECKING:
    from sglang_bcg_dsa.bench import Case

OK, WRONG, BAD_INPUT, UNNOTICED, INTERRUPTED = 0, 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    parser = _parser()
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        hint = "; SGLang's own come after --" if "host_args" in args else ""
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        status: int = args.run(args)
        return status
    except StartupError as error:
        print(error.message, file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; everything that was started has been stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()
        return OK
    except (OSError, RuntimeError, ValueError) as error:
        if args.debug:
            raise
        print(f"sglang-bcg-dsa {args.command}: {error} (--debug shows where)", file=sys.stderr)
        return WRONG


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Leave through the context managers, which stop what they started."""
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sglang-bcg-dsa", description=__doc__.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="what the plugin would do on this machine; needs no GPU")
    doctor.add_argument("--config", metavar="FILE", help="settings to examine instead of the environment's")
    doctor.set_defaults(run=_doctor)

    rehearse = commands.add_parser(
        "rehearse", help="the real server on this CPU, with and without graphs; compares exactly"
    )
    rehearse.add_argument("--ranks", type=int, default=2, help="DP ranks, each a process (default 2)")
    rehearse.add_argument("--requests", type=int, default=24, help="requests in each pass (default 24)")
    rehearse.add_argument("--model", default="dsa", help="dense, moe, mla, dsv4 or dsa (default)")
    rehearse.add_argument(
        "--fault", default="", metavar="NAME",
        help="show that a fault is noticed: disagree, die, stall, spin, hang, no-plugin, skip-break or drop-copy",
    )  # fmt: skip
    rehearse.add_argument("--host-only", action="store_true", help="the same without the plugin, for comparison")
    rehearse.add_argument(
        "--deepep", action="store_true", help="experts' tokens cross ranks through SGLang's DeepEP dispatcher, over gloo"
    )
    rehearse.add_argument("--seed", type=int, default=7, help="seed of the traffic (default 7)")
    rehearse.add_argument("--config", metavar="FILE", help="the plugin's settings in the rehearsal")
    rehearse.add_argument("--keep", type=Path, metavar="DIR", help="keep the servers' logs there")
    rehearse.add_argument(
        "--chaos", type=float, metavar="MINUTES",
        help="instead: rounds in which one rank is killed, stopped, slowed, made to disagree",
    )  # fmt: skip
    rehearse.add_argument(
        "--layers", action="store_true", help="with --chaos: votes and audit over gloo processes, without a server"
    )
    rehearse.set_defaults(run=_rehearse)

    bench = commands.add_parser("bench", help="prefill forwards on GPUs, eager against graphs: logits, time, memory")
    bench.add_argument("--tokens", default="64,256,512,1024", help="tokens a rank to time (default 64,256,512,1024)")
    bench.add_argument(
        "--check", default="", metavar="LENGTHS",
        help="batches whose logits are compared first: new tokens of requests, as in 64,100+28,2000/50; 2000/ stands for a "
        "cached prefix (default: --tokens)",
    )  # fmt: skip
    bench.add_argument("--profile", default="", metavar="TOKENS", help="profile replays of these sizes, as in 64,1024")
    bench.add_argument("--repeats", type=int, default=20, help="measured forwards in a block (default 20)")
    bench.add_argument(
        "--weights", choices=("seeded", "host"), default="seeded",
        help="with --load-format dummy: seeded weights, which do not vanish in rounding (default), or SGLang's",
    )  # fmt: skip
    bench.add_argument("--timeout", type=float, default=1200.0, help="seconds for everything (default 1200)")
    bench.add_argument("--show", type=Path, metavar="FILE", help="only show saved measurements; needs no GPU")
    bench.add_argument("--save", type=Path, metavar="FILE", help="write the measurements there as JSON too")
    bench.add_argument("host_args", nargs=argparse.REMAINDER, metavar="-- ARGS", help="arguments as for sglang serve")
    bench.set_defaults(run=_bench)

    compare = commands.add_parser(
        "compare", help="the real server on this machine's devices: answers with graphs against eager, and eager against itself"
    )
    compare.add_argument("--requests", type=int, default=100, help="requests in each round (default 100)")
    compare.add_argument("--seed", type=int, default=7, help="seed of the traffic (default 7)")
    compare.add_argument("--start-timeout", type=float, default=900.0, help="seconds for a server to start (default 900)")
    compare.add_argument("--keep", type=Path, metavar="DIR", help="keep the servers' logs and answers there")
    compare.add_argument("host_args", nargs=argparse.REMAINDER, metavar="-- ARGS", help="arguments as for sglang serve")
    compare.set_defaults(run=_compare)

    report = commands.add_parser("report", help="coverage, reasons, buckets and capture of a server, as tables and plots")
    report.add_argument(
        "sources", nargs="+", metavar="URL|FILE",
        help="a live server (http://HOST:PORT), saved /server_info or /metrics documents of one server, or logs",
    )  # fmt: skip
    report.add_argument("--plots", type=Path, metavar="DIR", help="write PNGs there; needs matplotlib")
    report.add_argument("--watch", type=float, default=0.0, metavar="SECONDS", help="sample a live server that long")
    report.add_argument("--api-key", metavar="KEY", help="for a server with --api-key or --admin-api-key")
    report.set_defaults(run=_report)

    dashboards = commands.add_parser("dashboards", help="write the Grafana dashboard and the Prometheus rules to a folder")
    dashboards.add_argument("folder", type=Path, metavar="DIR")
    dashboards.set_defaults(run=_dashboards)

    for command in (doctor, rehearse, bench, compare, report, dashboards):
        command.add_argument("--json", action="store_true", help="machine-readable, on standard output")
        command.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from sglang_bcg_dsa import doctor, show

    try:
        if args.config is not None:
            from sglang_bcg_dsa.config import load

            load(args.config or "(empty)")
            environment.use_config(args.config)
        decided, found, refusal = doctor.examine()
    except StartupError as error:
        if args.json:
            _print_json({"plugin": __version__, "ok": False, "refusal": error.message})
        raise
    if args.json:
        _print_json(doctor.as_json(decided, found, refusal))
    else:
        show.doctor(decided, found, refusal)
    return OK if refusal is None else WRONG


def _without_host(command: str) -> int | None:
    """The exit status where SGLang is not installed, after saying so; None where it is."""
    if importlib.util.find_spec("sglang") is not None:
        return None
    print(
        f"sglang-bcg-dsa {command}: SGLang is not installed in this environment; "
        "run pip install 'sglang-bcg-dsa[host]', or make demo from a checkout",
        file=sys.stderr,
    )
    return BAD_INPUT


def _counts(option: str, text: str, between: str = ",") -> tuple[int, ...]:
    """Whole numbers in an option's value."""
    try:
        return tuple(int(word) for word in text.split(between) if word or between == "+")
    except ValueError:
        raise ValueError(f"{option} {text}: expected whole numbers with {between!r} between them") from None


def _case(text: str) -> Case:
    """A batch of ``--check``."""
    from sglang_bcg_dsa.bench import Case

    prefix, slash, lengths = text.rpartition("/")
    return Case(_counts("--check", lengths, "+"), sum(_counts("--check", prefix, "+")) if slash else 0)


def _rehearse(args: argparse.Namespace) -> int:
    if (status := _without_host("rehearse")) is not None:
        return status
    from sglang_bcg_dsa import show
    from sglang_bcg_dsa.config import load
    from sglang_bcg_dsa.rehearse import BadRequest, Options, as_json, rehearse

    options = Options(
        ranks=args.ranks, requests=args.requests, model=args.model, fault=args.fault, host_only=args.host_only,
        deepep=args.deepep, seed=args.seed, config=args.config, keep=args.keep,
    )  # fmt: skip
    try:
        options.check()
    except BadRequest as error:
        print(f"sglang-bcg-dsa rehearse: {error}", file=sys.stderr)
        return BAD_INPUT
    load(args.config)
    if args.chaos is not None:
        return _chaos(args, options)
    outcome = rehearse(options, show.progress)
    if args.json:
        _print_json(as_json(outcome))
    else:
        show.rehearsal(outcome)
    return {"equal": OK, "failed": WRONG, "unnoticed": UNNOTICED}[outcome.status]


def _chaos(args: argparse.Namespace, options: Any) -> int:
    from sglang_bcg_dsa import chaos, show
    from sglang_bcg_dsa.testing import layers

    if not 0 < args.chaos <= 1440 or options.fault or options.host_only or options.config:
        print(
            f"sglang-bcg-dsa rehearse: --chaos {args.chaos:g}: expected minutes up to 1440, and neither --fault, --host-only "
            "nor --config, which it chooses itself",
            file=sys.stderr,
        )
        return BAD_INPUT
    found = (
        layers.run(options.ranks, options.seed, args.chaos, show.progress)
        if args.layers
        else chaos.run(options, args.chaos, show.progress).as_json()
    )
    _print_json(found) if args.json else show.chaos(found)
    return WRONG if found["problems"] else OK


def _bench(args: argparse.Namespace) -> int:
    from sglang_bcg_dsa import show

    if args.show is not None:
        try:
            measured = json.loads(args.show.read_text())
            _print_json(measured) if args.json else show.bench(measured)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            print(f"sglang-bcg-dsa bench: {args.show} is no file of bench --save ({error})", file=sys.stderr)
            return BAD_INPUT
        return OK
    if (status := _without_host("bench")) is not None:
        return status
    from sglang_bcg_dsa.bench import BenchFailed, Case, Options, parse, run

    host_args = [word for word in args.host_args if word != "--"]
    try:
        tokens, profile = _counts("--tokens", args.tokens), _counts("--profile", args.profile)
        check = tuple(_case(batch) for batch in args.check.split(",") if batch)
        options = Options(tokens, check or tuple(Case((n,)) for n in tokens), profile, args.repeats, args.weights)
        if args.save is not None and not args.save.absolute().parent.is_dir():
            raise ValueError(f"--save {args.save}: there is no such folder")
        parse(host_args)
    except ValueError as error:
        print(f"sglang-bcg-dsa bench: {error}", file=sys.stderr)
        return BAD_INPUT
    failure = None
    try:
        measured = run(options, host_args, args.timeout)
    except BenchFailed as failed:
        failure, measured = str(failed), failed.measured
    if args.save is not None:
        args.save.write_text(json.dumps(measured, indent=2))
    if args.json:
        _print_json(measured)
    else:
        show.bench(measured)
    if failure is not None:
        print(f"sglang-bcg-dsa bench: {failure}", file=sys.stderr)
        return WRONG
    return OK


def _compare(args: argparse.Namespace) -> int:
    from sglang_bcg_dsa import show

    if (status := _without_host("compare")) is not None:
        return status
    from sglang_bcg_dsa.bench import parse
    from sglang_bcg_dsa.compare import Options, as_json, compare

    host_args = [word for word in args.host_args if word != "--"]
    try:
        options = Options(args.requests, args.seed, args.start_timeout, args.keep)
        parse(host_args)
    except ValueError as error:
        print(f"sglang-bcg-dsa compare: {error}", file=sys.stderr)
        return BAD_INPUT
    outcome = compare(options, host_args, show.progress)
    if args.json:
        _print_json(as_json(outcome))
    else:
        show.comparison(outcome)
    return WRONG if outcome.problems else OK


def _report(args: argparse.Namespace) -> int:
    from sglang_bcg_dsa import show
    from sglang_bcg_dsa.report import ReportError, read

    try:
        if args.plots is not None:
            from sglang_bcg_dsa import plots

            plots.check(args.plots)
        if not 0 <= args.watch <= 86400:
            raise ReportError(f"--watch {args.watch:g}: expected up to 86400 seconds")
        found = read(args.sources, watch=args.watch, api_key=args.api_key, say=show.progress)
        written = plots.draw(found, args.plots) if args.plots is not None else []
    except ReportError as error:
        print(f"sglang-bcg-dsa report: {error}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        _print_json({**found.as_json(), "plots": [str(path) for path in written]})
        return OK
    show.report(found)
    for path in written:
        show.progress(f"wrote {path}")
    return OK


def _dashboards(args: argparse.Namespace) -> int:
    written = []
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
        for source in sorted((files("sglang_bcg_dsa") / "ops").iterdir(), key=lambda path: path.name):
            written.append(args.folder / source.name)
            written[-1].write_bytes(source.read_bytes())
    except OSError as error:
        print(f"sglang-bcg-dsa dashboards: {args.folder} cannot be written: {error.strerror}", file=sys.stderr)
        return BAD_INPUT
    if args.json:
        _print_json([str(path) for path in written])
    else:
        print("\n".join(map(str, written)))
    return OK


def _print_json(value: Any) -> None:
    json.dump(value, sys.stdout, indent=2, allow_nan=False)
    print()


if __name__ == "__main__":
    sys.exit(main())
