"""What is told about a prefill forward, a capture and a feature. Plain, frozen, host-independent."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

from sglang_bcg_dsa.predicate import BatchFacts
from sglang_bcg_dsa.vote import Verdict


class State(enum.Enum):
    """What becomes of a feature on the installed host."""

    SUPPLIED = "supplied"
    """The host lacks it; the plugin does it."""
    EXTENDED = "extended"
    """The host has it; the plugin takes it over or adds to it."""
    NATIVE = "native"
    """Left to the host."""
    OFF = "off"
    """Switched off by configuration."""
    REFUSED = "refused"
    """It cannot run here; the reason says why."""


class Feature(NamedTuple):
    """One feature and its state on this host."""

    name: str
    state: State
    reason: str

    @property
    def active(self) -> bool:
        """Whether the plugin does anything for this feature here."""
        return self.state in (State.SUPPLIED, State.EXTENDED)


class BatchView(NamedTuple):
    """A batch this rank is about to vote on, as a veto sees it."""

    facts: BatchFacts
    bucket: int | None
    """The bucket this rank alone would pad to; the group may agree on a larger one."""
    source: Any
    """The host's own batch object. Read it, never change it; its type differs between hosts."""


class Forward(NamedTuple):
    """One prefill forward of the target model on this rank."""

    replay: bool
    against: int
    """Reasons of all ranks, as a mask; 0 when it replayed."""
    tokens: int
    """Real tokens of this rank; 0 on an idle rank."""
    padded: int
    """Tokens the forward runs: the bucket on replay."""
    bucket: int | None
    verdict: Verdict | None
    """The vote behind it; None where there is no group to vote."""
    adapter_us: float
    """Microseconds of our own work in vote and check, the gather itself excluded."""


class Captured(NamedTuple):
    """One captured bucket."""

    bucket: int
    seconds: float
    bytes: int | None
    """Device memory it took; None where the device does not tell."""
