"""Benchmark of prefill forwards on GPUs: eager against graphs, in one process and in turns.

Contract: starts one process per rank with SGLang's own arguments, prints nothing, returns plain
data. What is compared: logits of the same inputs (eager, eager again, graphs), then time. With
``--plugins bcg_dsa`` among the arguments the graphs are this plugin's, without it the host's own.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from queue import Empty
from typing import Any, NamedTuple, NoReturn

from sglang_bcg_dsa import __version__
from sglang_bcg_dsa.bench_rank import DONE, main

_POLL_SECONDS = 1.0


class BenchFailed(RuntimeError):
    """A rank ended before all was measured; ``measured`` is what had been."""

    def __init__(self, message: str, measured: dict[str, Any]) -> None:
        super().__init__(message)
        self.measured = measured


class Case(NamedTuple):
    """New tokens of each request of a batch, after a cached prefix of ``prefix`` tokens of its own."""

    lengths: tuple[int, ...]
    prefix: int = 0


@dataclass(frozen=True)
class Options:
    """What to measure.

    ``tokens``: prefill tokens of each rank, one request each, to time. ``check``: the batches whose
    logits are compared. ``profile``: tokens of replays to profile with
    Python's profiler, which slows them. ``weights``: "seeded" (do not vanish in
    rounding) or "host" (the checkpoint's, or SGLang's dummies).
    """

    tokens: tuple[int, ...] = (64, 256, 512, 1024)
    check: tuple[Case, ...] = ()
    profile: tuple[int, ...] = ()
    repeats: int = 20
    weights: str = "seeded"
    seed: int = 7

    def __post_init__(self) -> None:
        if not self.tokens or min(self.tokens) < 1:
            raise ValueError(f"--tokens {','.join(map(str, self.tokens))}: expected token counts of at least 1")
        if any(not case.lengths or min(case.lengths) < 1 or case.prefix < 0 for case in self.check):
            raise ValueError("--check: expected request lengths of at least 1, as in 100+28+7 or, after a cached prefix, 2000/64")
        if self.repeats < 2:
            raise ValueError(f"--repeats {self.repeats}: expected at least 2, for a median")


def run(options: Options, host_args: Sequence[str], timeout: float) -> dict[str, Any]:
    """Measure. ``host_args`` as for ``sglang serve``. Raises BenchFailed, or what SGLang raises for bad arguments."""
    import multiprocessing

    server_args = _resolve(host_args)
    from sglang.srt.entrypoints.engine import _set_envs_and_config
    from sglang.srt.server_args import PortArgs

    _set_envs_and_config(server_args)
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    port_args = PortArgs.init_new(server_args)
    ranks = [
        context.Process(target=main, args=(server_args, port_args, options, rank, results))
        for rank in range(server_args.tp_size)
    ]
    measured: dict[str, Any] = {
        "environment": environment(), "arguments": list(host_args), "options": vars(options)
    }  # fmt: skip
    with _ended(ranks):
        for process in ranks:
            process.start()
        measured.update(_arriving(ranks, results, timeout, measured))
    return measured


class _Parser(argparse.ArgumentParser):
    """SGLang's parser, whose error is one line instead of four hundred of usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ValueError."""
        raise ValueError(f"SGLang's arguments: {message}")


def parse(host_args: Sequence[str]) -> argparse.Namespace:
    """Arguments as for ``sglang serve``, parsed and not yet resolved. Raises ValueError for what SGLang does not know."""
    if not host_args:
        raise ValueError("no arguments for SGLang; they come after --, as in -- --model-path MODEL --tp 2")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = _Parser(prog="sglang serve", add_help=False)
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(list(host_args))


def _resolve(host_args: Sequence[str]) -> Any:
    parsed = parse(host_args)
    from sglang.srt.server_args import ServerArgs

    return ServerArgs.from_cli_args(parsed)


def _arriving(ranks: Sequence[Any], results: Any, timeout: float, measured: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Measurements as they are made. Raises BenchFailed when a rank ends, or time is up, before the last."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            name, value = results.get(timeout=_POLL_SECONDS)
        except Empty:
            failed = [(rank, p.exitcode) for rank, p in enumerate(ranks) if p.exitcode not in (None, 0)]
            if failed:
                who = ", ".join(f"rank {rank} (status {code})" for rank, code in failed)
                raise BenchFailed(f"{who} ended before all was measured; its traceback stands above", measured) from None
            if time.monotonic() > deadline:
                raise BenchFailed(
                    f"not done within {timeout:g} s; a first run compiles kernels for minutes: raise --timeout", measured
                ) from None
            continue
        if name == DONE:
            return
        yield name, value


@contextlib.contextmanager
def _ended(ranks: Sequence[Any]) -> Iterator[None]:
    """Whatever happens, no rank is left behind."""
    try:
        yield
        for process in ranks:
            process.join(30)
    finally:
        for process in ranks:
            if process.is_alive():
                process.kill()


def environment() -> dict[str, str]:
    """Date, card, driver and versions: what a number means nothing without."""
    import torch

    found = {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "plugin": __version__,
        "cuda": str(torch.version.cuda),
        "card": torch.cuda.get_device_name(),
        "cards": str(torch.cuda.device_count()),
        "driver": _driver(),
    }
    for package in ("sglang", "torch", "flashinfer-python", "sgl-deep-gemm", "sglang-kernel"):
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _driver() -> str:
    """The NVIDIA driver's release, as the kernel module tells it."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
    except OSError:
        return "unknown"
    return next((word for word in words if word[:1].isdigit()), "unknown")
