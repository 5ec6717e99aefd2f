"""A server whose five processes do not each import the libraries of SGLang; on ``PYTHONPATH`` of those who want it.

Contract: in ``python -m sglang.launch_server`` the modules listed in the file that ``BCG_DSA_TEST_PRELOAD`` names
are imported first, none of which is SGLang's. A child that is spawned later begins as a fork of the process
as it was then, with what a spawn gives it: parent, arguments, environment, descriptors. So SGLang's own modules, its
plugins and their hooks are loaded in each process, in the order of a plain start. Whatever goes wrong ends the process.
Not promised: a hash seed of its own for each process.

A process imports for 9 s, of which SGLang's own modules take 2: a server of two ranks is up after 20 s, not 45.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing.util as util
import os
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import NoReturn

MODULES = "BCG_DSA_TEST_PRELOAD"
TOO_EARLY = frozenset({"sglang", "sglang_bcg_dsa", "prometheus_client"})
"""What a server has to import itself: the last reads a variable that SGLang sets first."""

_PDEATHSIG, _SUBREAPER = 1, 36


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def _spawn_by_fork(others: list[int]) -> None:
    """Keep a copy of this process as it is, without the descriptors ``others``; spawned children become its forks."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for fd in (here.detach(), *others):
            os.close(fd)
        _prctl(_PDEATHSIG, signal.SIGKILL)
        while True:
            order, received, _, _ = socket.recv_fds(there, 1 << 20, 64)
            if not order:
                os._exit(0)
            between = os.fork()
            if between == 0:
                between = os.getpid()
                if os.fork():
                    os._exit(0)
                while os.getppid() == between:
                    time.sleep(0.001)
                there.send(b"%d" % os.getpid())
                there.close()
                _be_child(**json.loads(order), received=received)
            for fd in received:
                os.close(fd)
            os.waitpid(between, 0)
    there.close()
    plain, one_at_a_time = util.spawnv_passfds, threading.Lock()

    def spawnv_passfds(path: bytes, args: list[str], passfds: list[int]) -> int:
        if args[-1] != "--multiprocessing-fork":
            return plain(path, args, passfds)
        fds = sorted(set(passfds))
        order = json.dumps({"code": args[-2], "env": dict(os.environ), "fds": fds})
        with one_at_a_time:
            # A grandchild of the copy, which becomes this process's child when the one between ends.
            _prctl(_SUBREAPER, 1)
            socket.send_fds(here, [order.encode()], fds)
            pid = here.recv(64)
            _prctl(_SUBREAPER, 0)
        if not pid:
            raise RuntimeError("the copy of this process that children are forked from is gone")
        return int(pid)

    util.spawnv_passfds = spawnv_passfds


def _be_child(code: str, env: dict[str, str], fds: list[int], received: list[int]) -> NoReturn:
    """Do what a new interpreter does for ``multiprocessing.spawn``, and end as it does."""
    status = 1
    try:
        _spawn_by_fork(received)
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 1 + max(fds)) for fd in received]
        for fd in received:
            os.close(fd)
        for fd, target in zip(moved, fds, strict=True):
            os.dup2(fd, target)
            os.close(fd)
        os.environ.clear()
        os.environ.update(env)
        sys.argv = ["-c", "--multiprocessing-fork"]
        exec(code, {})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _preload(names: list[str]) -> None:
    """Import them; RuntimeError when SGLang came with them."""
    gc.disable()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in names:
            importlib.import_module(name)
    if early := TOO_EARLY & sys.modules.keys():
        raise RuntimeError(f"{', '.join(sorted(early))} came with the libraries")
    gc.freeze()  # forks share what no collection touches
    gc.enable()


if MODULES in os.environ and sys.orig_argv[1:3] == ["-m", "sglang.launch_server"]:
    try:
        _preload(Path(os.environ[MODULES]).read_text().split())
        _spawn_by_fork([])
    except Exception as error:  # the start of Python would only print it
        raise SystemExit(f"{__file__}: {error!r}") from error
