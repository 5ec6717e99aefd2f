"""Faults for a rehearsal: one rank disagrees, dies, stalls, hangs or runs without the plugin.

Contract: active only in a process whose environment names a fault (``NAME@RANK``, or
``NAME@RANK@PREFILLS`` with how many prefills go well first), through a metadata folder on
``PYTHONPATH`` that the rehearsal writes. Each fault is something that happens in the field; none of
them changes the plugin itself:

``disagree``   a batch carries at forward time what it did not carry at vote time
``die``        the rank is killed by the system (SIGKILL) while the group serves
``stall``      the rank stops coming to the vote
``spin``       the same, and it keeps the interpreter: no other thread of the rank runs
``hang``       the rank does not go on in a forward that its group agreed on
``slow``       a forward takes long, and ends: nothing is to come of it
``no-plugin``  the plugin is not switched on in that rank's process
"""

from __future__ import annotations

import ctypes
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
MARK = "rehearsal fault:"
FAULTS = ("disagree", "die", "stall", "spin", "hang", "no-plugin")
HARMLESS = ("slow",)
AFTER_PREFILLS = 2
"""Prefills that go well first, so that the fault hits a group that works."""


SLOW_SECONDS = 2.5
_FOR_GOOD = 3600


def asked() -> tuple[str, int, int]:
    """(fault, rank, prefills before) from the environment; ("", -1, 0) when there is none. SystemExit for a bad one."""
    text = environment.fault()
    if not text:
        return "", -1, 0
    name, *numbers = text.split("@")
    if name not in (*FAULTS, *HARMLESS) or not 1 <= len(numbers) <= 2 or not all(map(str.isdecimal, numbers)):
        raise SystemExit(
            f"{environment.FAULT}={text!r}: expected one of {', '.join((*FAULTS, *HARMLESS))}, then @RANK or @RANK@PREFILLS"
        )
    return name, int(numbers[0]), int(numbers[1]) if len(numbers) == 2 else AFTER_PREFILLS


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
    name, rank, _ = asked()
    if not name or rank_of_process() != rank:
        return
    if name == "no-plugin":
        environment.withdraw()
    elif name in _IN_FORWARD:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(
            "sglang.srt.model_executor.model_runner.ModelRunner._forward_raw",
            _before_forward,
            HookType.BEFORE,
        )


_IN_FORWARD = ("disagree", "hang", "slow")
_agreed = 0


def _before_forward(model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """What happens to a batch that its group agreed to replay: an embedding nobody voted on, or no going on."""
    global _agreed
    name, rank, after = asked()
    flags = ("can_run_dp_prefill_cuda_graph", "can_run_dp_breakable_cuda_graph")
    if not forward_batch.forward_mode.is_extend() or not any(getattr(forward_batch, f, False) for f in flags):
        return
    _agreed += 1
    if _agreed <= after:
        return
    if _agreed == after + 1:
        _say(name, rank)
    if name == "disagree":
        forward_batch.replace_embeds = forward_batch.input_ids
    elif name == "hang":
        time.sleep(_FOR_GOOD)
    elif _agreed == after + 1:
        time.sleep(SLOW_SECONDS)


def _say(name: str, rank: int) -> None:
    """The log shows when the fault came."""
    print(f"{MARK} {name} on rank {rank}", flush=True)


class FaultPlugin:
    """Entry point of ``sglang_bcg_dsa``: the faults that happen on the way to a vote."""

    def __init__(self) -> None:
        self._fault, self._rank, self._after = asked()
        if rank_of_process() != self._rank:
            self._fault = ""
        self._prefills = 0

    @hookimpl
    def bcg_replay_veto(self, batch: BatchView) -> None:
        self._prefills += 1
        if self._prefills <= self._after or self._fault not in ("die", "stall", "spin"):
            return
        _say(self._fault, self._rank)
        if self._fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self._fault == "stall":
            time.sleep(_FOR_GOOD)
        else:
            ctypes.PyDLL(None).sleep(_FOR_GOOD)


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
