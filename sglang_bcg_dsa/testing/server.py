"""Start the real SGLang server on this machine's CPU, talk to it, and leave nothing behind.

Contract of `running_server`: it yields when every scheduler answers; it raises `ServerDied` with
the log's last meaningful lines when the server ends or does not come up in time; and when it is
left, for whatever reason, no process of the server is alive. If the caller is killed, the server
is killed too. Standard library only: the server may run in another interpreter than the caller.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from sglang_bcg_dsa.testing import platform
from sglang_bcg_dsa.testing.settings import FAULT, TAPE, TapeSettings

PACKAGE_ROOT = Path(__file__).resolve().parents[2]


class ServerDied(RuntimeError):
    """The server ended by itself, or did not answer in time; the message has the end of its log."""


class Startable(Protocol):
    """What `running_server` has to know of a server."""

    @property
    def start_timeout(self) -> float:
        """Seconds until it must answer."""

    def command(self, port: int) -> list[str]:
        """The command line."""

    def environment(self, metadata: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment; ``metadata`` is where the CPU platform's entry points are."""


@dataclass(frozen=True)
class ServerSpec:
    """What server to start.

    ``graphs`` off: the same server, eager. ``env`` and ``extra_args`` come last and win.
    Directories in ``python_path`` go before this package on ``PYTHONPATH``.
    """

    model: Path
    python: Path = Path(sys.executable)
    tp: int = 1
    dp: int = 1
    dp_attention: bool = False
    graphs: bool = True
    ladder: tuple[int, ...] = (16, 32, 64)
    chunked_prefill_size: int | None = None
    fault: str = ""
    max_total_tokens: int = 4096
    max_running_requests: int = 8
    extra_args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    python_path: tuple[Path, ...] = ()
    start_timeout: float = 300.0

    @property
    def ranks(self) -> int:
        """Scheduler processes."""
        return self.tp if self.dp_attention else self.tp * self.dp

    def command(self, port: int) -> list[str]:
        """The command line."""
        argv = [str(self.python), "-m", "sglang.launch_server", "--model-path", str(self.model)]
        argv += ["--load-format", "dummy", "--skip-tokenizer-init", "--dtype", "float32"]
        argv += ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
        argv += ["--attention-backend", "bcg_cpu", "--sampling-backend", "pytorch"]
        argv += ["--max-total-tokens", str(self.max_total_tokens)]
        argv += ["--max-running-requests", str(self.max_running_requests)]
        argv += ["--skip-server-warmup", "--enable-metrics", "--disable-decode-cuda-graph"]
        if self.tp > 1:
            argv += ["--tp", str(self.tp)]
        if self.dp > 1:
            argv += ["--dp", str(self.dp)]
        if self.dp_attention:
            argv += ["--enable-dp-attention"]
        if self.chunked_prefill_size is not None:
            argv += ["--chunked-prefill-size", str(self.chunked_prefill_size)]
        if self.graphs:
            argv += ["--cuda-graph-backend-prefill", "breakable"]
            argv += ["--cuda-graph-bs-prefill", *map(str, self.ladder)]
        else:
            argv += ["--disable-prefill-cuda-graph"]
        return [*argv, *self.extra_args]

    def environment(self, metadata: Path, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment; ``metadata`` is where `platform.write_distribution` wrote."""
        settings = TapeSettings.from_env({TAPE: str(int(self.graphs)), FAULT: self.fault})
        path = [*map(str, self.python_path), str(PACKAGE_ROOT), str(metadata)]
        if inherited.get("PYTHONPATH"):
            path.append(inherited["PYTHONPATH"])
        cores = sorted(os.sched_getaffinity(0))
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(path),
            "PYTHONUNBUFFERED": "1",
            "SGLANG_PLATFORM": platform.NAME,
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            # One thread a rank: sums are then made in one order.
            "OMP_NUM_THREADS": "1",
            # One entry a rank; ranks share cores where there are fewer.
            "SGLANG_CPU_OMP_THREADS_BIND": "|".join(
                str(cores[rank % len(cores)]) for rank in range(self.ranks)
            ),
            # There is no device whose core dump would be worth the host's 65 s wait after a crash.
            "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
            **settings.to_env(),
            **self.env,
        }


@dataclass(frozen=True)
class ServerHandle:
    """A server that is up."""

    port: int
    log_path: Path
    process: subprocess.Popen[bytes]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, path: str, body: object = None, timeout: float = 60.0) -> str:
        """GET, or POST ``body`` as JSON; an HTTP error carries the server's answer."""
        request = urllib.request.Request(
            self.url + path,
            None if body is None else json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as response:
                return str(response.read().decode())
        except urllib.error.HTTPError as error:
            answer = error.read().decode(errors="replace")
            raise RuntimeError(f"{path}: HTTP {error.code}: {answer[:2000]}") from error

    def generate(
        self,
        input_ids: Sequence[int],
        max_new_tokens: int = 8,
        *,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        timeout: float = 60.0,
        rank: int | None = None,
        **extra: Any,
    ) -> dict[str, Any]:
        """One greedy request to a DP rank, or to any. ``extra`` goes into the body."""
        body = self._body(list(input_ids), max_new_tokens, return_logprob, logprob_start_len, rank, extra)
        answer: dict[str, Any] = json.loads(self.request("/generate", body, timeout))
        _check_rank([answer], rank)
        return answer

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int = 8,
        *,
        return_logprob: bool = False,
        logprob_start_len: int | None = None,
        timeout: float = 60.0,
        rank: int | None = None,
        **extra: Any,
    ) -> list[dict[str, Any]]:
        """Several greedy requests in one HTTP call, so that the scheduler can batch them."""
        ids = [list(prompt) for prompt in prompts]
        body = self._body(ids, max_new_tokens, return_logprob, logprob_start_len, rank, extra)
        answer: list[dict[str, Any]] = json.loads(self.request("/generate", body, timeout))
        _check_rank(answer, rank)
        return answer

    @staticmethod
    def _body(
        ids: object, new: int, logprob: bool, start: int | None, rank: int | None, extra: Mapping[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "input_ids": ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": logprob,
        }
        if start is not None:
            body["logprob_start_len"] = start
        if rank is not None:
            body["routed_dp_rank"] = rank
        return {**body, **extra}

    def server_info(self) -> dict[str, Any]:
        """The server's arguments and each scheduler's internal state."""
        info: dict[str, Any] = json.loads(self.request("/server_info"))
        return info

    def metrics(self) -> str:
        """Prometheus text."""
        return self.request("/metrics")

    def flush_cache(self) -> None:
        """Empty the prefix cache."""
        self.request("/flush_cache", {})

    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace")

    def pids(self) -> list[int]:
        """The server's live processes, the launching one first."""
        return [
            self.process.pid,
            *(p for p in _family(self.process.pid, ()) if p != self.process.pid),
        ]


def _check_rank(answers: Sequence[Mapping[str, Any]], rank: int | None) -> None:
    """A field of a request that the host does not know is dropped in silence; so the answer is asked who gave it."""
    others = {str(answer["meta_info"].get("dp_rank")) for answer in answers} - {str(rank)}
    if rank is not None and others:
        raise RuntimeError(f"requests for DP rank {rank} were answered by {', '.join(sorted(others))}; is routed_dp_rank known?")


def logprobs(answer: Mapping[str, Any]) -> list[float]:
    """The log-probabilities of an answer: prompt tokens asked for, then generated ones.

    A NaN, which JSON cannot hold, comes back as ``nan``; so does nothing else.
    """
    meta = answer["meta_info"]
    prompt = [entry[0] for entry in (meta.get("input_token_logprobs") or ())]
    if prompt and prompt[0] is None:
        prompt = prompt[1:]  # the first token has no probability
    made = [entry[0] for entry in (meta.get("output_token_logprobs") or ())]
    return [float("nan") if value is None else float(value) for value in (*prompt, *made)]


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def working_folder(keep: Path | None, prefix: str) -> Iterator[Path]:
    """A folder for servers' logs: ``keep``, which is made and stays, or a temporary one."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.resolve()
    else:
        with tempfile.TemporaryDirectory(prefix=prefix) as folder:
            yield Path(folder)


_LIBC = ctypes.CDLL(None)  # loaded here: the forked child should do as little as it can
_PR_SET_PDEATHSIG = 1


def _die_with_caller() -> None:
    """In the child: be killed when the caller is. SGLang's own processes then follow theirs."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def running_server(spec: Startable, workdir: Path, name: str = "server") -> Iterator[ServerHandle]:
    """The server of ``spec``; its log is ``workdir/name.log``. See the head of this module."""
    workdir.mkdir(parents=True, exist_ok=True)
    metadata = workdir / "platform"
    platform.write_distribution(metadata)
    log_path = workdir / f"{name}.log"
    port = free_port()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            spec.command(port),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=spec.environment(metadata, os.environ),
            cwd=workdir,
            start_new_session=True,
            preexec_fn=_die_with_caller,
        )
    try:
        handle = ServerHandle(port, log_path, process)
        _wait_until_up(handle, spec.start_timeout)
        yield handle
    finally:
        _end(process)


def _wait_until_up(handle: ServerHandle, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        code = handle.process.poll()
        if code is not None:
            raise ServerDied(f"the server ended with status {code}\n{log_tail(handle.log_path)}")
        if time.monotonic() > deadline:
            raise ServerDied(f"no answer within {timeout:.0f} s\n{log_tail(handle.log_path)}")
        try:
            # Answered by each scheduler, and unlike a health check it runs no forward.
            handle.server_info()
            return
        except (OSError, RuntimeError):
            time.sleep(0.25)


_NOISE = re.compile(r"^\s*$|Warning|warnings\.warn|\[rank\d+\]:\[W|Killed|resource_tracker")


def log_tail(path: Path, lines: int = 40) -> str:
    """The log's first traceback (the cause of the others) and last lines, without warnings."""
    text = path.read_text(errors="replace").splitlines()
    useful = [line for line in text if not _NOISE.search(line)]
    marks = ("Traceback (most recent call last)", "terminate called", "Fatal Python error")
    first = next((i for i, line in enumerate(useful) if any(m in line for m in marks)), None)
    last = useful[-lines // 4 :]
    if first is None:
        return "\n".join([f"{path}:", *useful[-lines:]])
    block = useful[first:]
    # A traceback ends with its first line at the margin that is not "Traceback" itself.
    end = next((i for i, line in enumerate(block[1:], 1) if not line.startswith((" ", "\t"))), 0)
    cause = block[: end + 1] if end else block
    if len(cause) > lines:
        cause = [cause[0], "  ...", *cause[-lines:]]
    return "\n".join([f"{path}:", *cause, "...", *last])


def _stat(pid: int) -> tuple[str, int, int, int] | None:
    """(state, parent, group, session) of a process, or None if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent, group, session = text.rpartition(")")[2].split()[:4]
    return state, int(parent), int(group), int(session)


def _family(root: int, known: Sequence[int]) -> list[int]:
    """Live processes that descend from ``root``, share its session, or were ``known`` to."""
    stats: dict[int, tuple[str, int, int, int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdecimal() and (stat := _stat(int(entry))) is not None and stat[0] not in "ZX":
            stats[int(entry)] = stat
    members = {root, *known}
    members |= {pid for pid, (_, _, group, session) in stats.items() if root in (group, session)}
    grown = True
    while grown:
        children = {pid for pid, stat in stats.items() if stat[1] in members}
        grown = not children <= members
        members |= children
    return sorted(members & stats.keys())


def _end(process: subprocess.Popen[bytes], timeout: float = 15.0) -> None:
    """Kill the server and all that came from it; ``RuntimeError`` if anything survives."""
    deadline = time.monotonic() + timeout
    family: list[int] = []
    while True:
        # Again and again: a process may have started another one between listing and killing.
        family = _family(process.pid, family)
        for pid in family:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.poll()
        if not family:
            process.wait(timeout)
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes of the server survive: {family}")
        time.sleep(0.05)
