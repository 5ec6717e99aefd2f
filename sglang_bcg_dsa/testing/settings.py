"""What the environment asks of the CPU platform; the one module of `testing` that reads it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

TAPE = "SGLANG_BCG_DSA_TAPE"
FAULT = "SGLANG_BCG_DSA_TAPE_FAULT"

Fault = Literal["", "skip-break", "drop-copy"]


@dataclass(frozen=True)
class TapeSettings:
    """Settings of one server process.

    ``tape``: prefill graphs are captured and replayed as tapes; off, the server is eager.
    ``fault``: a deliberate defect at replay, so that a comparison can be shown to fail.
    ``fault_rank``: the one rank that has it, or None for all.
    """

    tape: bool = False
    fault: Fault = ""
    fault_rank: int | None = None

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TapeSettings:
        """Read the settings; ``SystemExit`` names the variable, its value and what it may be."""
        environ = os.environ if environ is None else environ
        tape = environ.get(TAPE, "")
        if tape not in ("", "0", "1"):
            raise SystemExit(f"{TAPE}={tape!r}: expected 1 (on), 0 or nothing (off)")
        text = environ.get(FAULT, "")
        fault, at, rank = text.partition("@")
        if fault not in get_args(Fault) or (at and not (fault and rank.isdecimal())):
            names = ", ".join(name for name in get_args(Fault) if name)
            raise SystemExit(f"{FAULT}={text!r}: expected one of {names}, optionally with @RANK")
        return cls(tape == "1", cast(Fault, fault), int(rank) if at else None)

    def to_env(self) -> dict[str, str]:
        """The variables that make `from_env` return these settings in a child process."""
        rank = "" if self.fault_rank is None else f"@{self.fault_rank}"
        return {TAPE: "1" if self.tape else "0", FAULT: f"{self.fault}{rank}"}
