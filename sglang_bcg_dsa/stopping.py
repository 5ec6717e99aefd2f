"""Ends a rank in a way that ends the server.

Contract: SGLang's scheduler catches ``Exception`` and tells the launching process with SIGQUIT; a
SystemExit, or a thread, would leave the others waiting. These do what the scheduler does.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time

from sglang_bcg_dsa.errors import StartupError

logger = logging.getLogger(__name__)


def refuse(message: str) -> StartupError:
    """Announce that this process cannot start and, on a rank, tell the launching process; raise the result."""
    error = StartupError(message)
    logger.critical("%s", error)
    error.announce()
    _tell_parent()
    return error


def bring_down() -> None:
    """End the server from a thread, while the main thread may be stuck in a collective."""
    logging.shutdown()
    _end()


def bring_down_within(seconds: float) -> None:
    """End the server even if what is done until then (asking ranks, writing a report) gets stuck itself."""
    timer = threading.Timer(seconds, _end)
    timer.daemon = True
    timer.start()


def _end() -> None:
    _tell_parent()
    time.sleep(1.0)
    os._exit(1)


def _tell_parent() -> None:
    if multiprocessing.parent_process() is None:
        return  # the launching process itself: its parent is a shell
    os.kill(os.getppid(), signal.SIGQUIT)
