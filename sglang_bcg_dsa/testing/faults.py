"""Faults for a rehearsal: one rank disagrees, dies, stalls or runs without the plugin.

Contract: active only in a process whose environment names a fault (``NAME@RANK``), through a
metadata folder on ``PYTHONPATH`` that the rehearsal writes. Each fault is something that happens
in the field; none of them changes the plugin itself:

``disagree``   a batch carries at forward time what it did not carry at vote time
``die``        the rank is killed by the system (SIGKILL) while the group serves
``stall``      the rank stops coming to the vote
``no-plugin``  the plugin is not switched on in that rank's process
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

from sglang_bcg_dsa import environment
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.records import BatchView
from sglang_bcg_dsa.testing import metadata_folder

DISTRIBUTION = "sglang-bcg-dsa-fault"
FAULTS = ("disagree", "die", "stall", "no-plugin")
AFTER_PREFILLS = 2
"""Prefills that go well first, so that the fault hits a group that works."""


def asked() -> tuple[str, int]:
    """(fault, rank) from the environment; ("", -1) when there is none. SystemExit for a bad one."""
    text = environment.fault()
    if not text:
        return "", -1
    name, at, rank = text.partition("@")
    if name not in FAULTS or not at or not rank.isdecimal():
        raise SystemExit(
            f"{environment.FAULT}={text!r}: expected one of {', '.join(FAULTS)}, then @RANK"
        )
    return name, int(rank)


def rank_of_process() -> int | None:
    """The tp_rank this scheduler process was spawned with; None in any other process.

    Plugins are loaded before SGLang has made the rank known, so it is read from the call that
    loads them.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "run_scheduler_process":
            return int(frame.f_locals["tp_rank"])
        frame = frame.f_back
    return None


def register() -> None:
    """Entry point of ``sglang.srt.plugins``; the folder comes first on the path, so it runs first."""
    name, rank = asked()
    if not name or rank_of_process() != rank:
        return
    if name == "no-plugin":
        environment.withdraw()
    elif name == "disagree":
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
            _late_fact,
            HookType.BEFORE,
        )


_agreed = 0


def _late_fact(model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Give a batch that its group agreed to replay an embedding nobody voted on."""
    global _agreed
    flags = ("can_run_dp_prefill_cuda_graph", "can_run_dp_breakable_cuda_graph")
    if forward_batch.forward_mode.is_extend() and any(
        getattr(forward_batch, f, False) for f in flags
    ):
        _agreed += 1
        if _agreed > AFTER_PREFILLS:
            forward_batch.replace_embeds = forward_batch.input_ids


class FaultPlugin:
    """Entry point of ``sglang_bcg_dsa``: the faults that happen on the way to a vote."""

    def __init__(self) -> None:
        self._fault, rank = asked()
        if rank_of_process() != rank:
            self._fault = ""
        self._prefills = 0

    @hookimpl
    def bcg_replay_veto(self, batch: BatchView) -> None:
        self._prefills += 1
        if self._prefills <= AFTER_PREFILLS:
            return
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault == "stall":
            time.sleep(3600)


def write_distribution(directory: Path) -> Path:
    """Write the metadata folder into ``directory``, to go first on ``PYTHONPATH``; return its path."""
    return metadata_folder.write(
        directory,
        DISTRIBUTION,
        {
            "sglang.srt.plugins": {"bcg_dsa_fault": f"{__name__}:register"},
            "sglang_bcg_dsa": {"rehearsal_fault": f"{__name__}:FaultPlugin"},
        },
    )
