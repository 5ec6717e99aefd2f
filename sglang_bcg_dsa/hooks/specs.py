"""What a plugin may implement: when it is called, in which processes, at what cost.

No hook decides a verdict: two ranks with different plugins would take different paths into a
collective. A plugin can refuse (:func:`bcg_replay_veto`), and its refusal travels in the vote.
No hook is called per segment. An exception from a hook stops the server, with its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sglang_bcg_dsa.hooks import hookspec

if TYPE_CHECKING:
    from sglang_bcg_dsa.config import Config
    from sglang_bcg_dsa.installer import Installer
    from sglang_bcg_dsa.reasons import ReasonTable
    from sglang_bcg_dsa.records import BatchView, Captured, Feature, Forward
    from sglang_bcg_dsa.seams import SeamSet
    from sglang_bcg_dsa.vote import Verdict


@hookspec(historic=True)
def bcg_configure(config: Config) -> None:
    """Once per process, first. A plugin registered later is told when it registers."""


@hookspec
def bcg_feature(config: Config, seams: SeamSet) -> Feature | None:
    """Once per process: what the plugin would do on this host. Must not import the host."""


@hookspec
def bcg_reasons() -> Iterable[str] | None:
    """Once per process: names of this plugin's own reasons (lower-case letters, digits, _).

    Each takes one bit of the vote. All ranks must declare the same: they compare at start.
    """


@hookspec
def bcg_install_arguments(config: Config, seams: SeamSet, installer: Installer) -> None:
    """In every process, before SGLang resolves its arguments: wrap seams of that resolution.

    Children get the resolved arguments from the launching process and resolve nothing.
    """


@hookspec
def bcg_install(config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
    """In processes that run a model, before SGLang applies hooks: wrap seams of the table."""


@hookspec
def bcg_replay_veto(batch: BatchView) -> str | None:
    """A reason of :func:`bcg_reasons` to run this batch eagerly, or None.

    Called once for each prefill batch, before the ranks vote (at forward time where there is no
    group), on the scheduler's thread. It must not touch the device; a microsecond here is a
    microsecond of every prefill.
    """


@hookspec
def bcg_verdict(verdict: Verdict) -> None:
    """After a step's votes were gathered, if some rank prefills. The same value on every rank."""


@hookspec
def bcg_forward(forward: Forward) -> None:
    """After each prefill forward of the target model was launched, replayed or eager."""


@hookspec
def bcg_captured(captured: Captured) -> None:
    """After each bucket of the target model was captured."""


@hookspec
def bcg_state() -> Mapping[str, Any] | None:
    """Entries for ``/server_info``: builtin types only, as SGLang encodes them with msgpack."""
