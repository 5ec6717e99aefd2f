"""Switches the plugin on in this process.

Contract: idempotent. Order: configuration, seams, plugins, features; only when all of it is sound
are seams wrapped. Anything that is not sound is a :class:`StartupError`, which SGLang cannot
swallow. The resolution of arguments is wrapped everywhere: any process may build an engine. The
rest depends on what the process does: one that runs a scheduler has imported SGLang's scheduler
before it loads plugins (it was spawned to run it); one that has not pays for no wraps it will
never use.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pluggy

from sglang_bcg_dsa import environment, features
from sglang_bcg_dsa.config import Config, load
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.hooks.attention import AttentionFeature
from sglang_bcg_dsa.hooks.audit import AuditFeature
from sglang_bcg_dsa.hooks.explain import ExplainFeature
from sglang_bcg_dsa.hooks.manager import build_manager, declared_reasons
from sglang_bcg_dsa.hooks.moe import MoeFeature
from sglang_bcg_dsa.hooks.rules import RulesFeature
from sglang_bcg_dsa.hooks.vote import VoteFeature
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature
from sglang_bcg_dsa.rollcall import RollCall
from sglang_bcg_dsa.seams import SeamSet, examine

logger = logging.getLogger(__name__)

_SCHEDULER = "sglang.srt.managers.scheduler"


@dataclass(frozen=True)
class Plan:
    """Everything decided before the host is touched."""

    config: Config
    host: str
    seams: SeamSet
    manager: pluggy.PluginManager
    reasons: ReasonTable
    features: tuple[Feature, ...]


_active: Plan | None = None
"""The plan in force in this process; the only module state of the package."""


def host_name() -> str:
    """The installed SGLang, for messages only."""
    try:
        return f"SGLang {version('sglang')}"
    except PackageNotFoundError:
        return "SGLang (not installed)"


def plan(config: Config) -> Plan:
    """Decide what would run here. Imports neither torch nor the host, registers nothing."""
    seams = examine()
    progress = Progress()
    decided: tuple[Feature, ...] = ()

    def states() -> dict[str, Any]:
        return {"features": features.as_state(decided)}

    manager = build_manager()
    hooks = manager.hook
    rolls = RollCall(progress)
    voting = VoteFeature(hooks, progress, rolls)
    builtin = (
        AttentionFeature(),
        MoeFeature(),
        voting,
        ExplainFeature(hooks, progress, states),
        AuditFeature(progress, rolls, states, lambda: voting.runner),
        RulesFeature(states),
    )
    for plugin in builtin:
        manager.register(plugin, plugin.name)
    decided = features.decide(config, seams, manager)
    for feature in decided:
        if not feature.active and manager.has_plugin(feature.name):
            manager.unregister(name=feature.name)
    manager.hook.bcg_configure.call_historic(kwargs={"config": config})
    return Plan(config, host_name(), seams, manager, ReasonTable(declared_reasons(manager)), decided)


def check(ready: Plan) -> None:
    """Raise StartupError for whatever stops a plan from being carried out."""
    features.require(ready.features, ready.seams, ready.host)
    if environment.skips_vote() and any(f.name == "vote" and f.active for f in ready.features):
        raise StartupError(
            f"{environment.HOST_SKIP_ALL_GATHER} is set: SGLang would not gather the ranks' votes, and ranks could "
            "take different paths into a collective; unset it, or set [vote] enabled = false"
        )


def activate() -> None:
    """Switch the plugin on in this process, or end it with the reason."""
    global _active
    if _active is not None:
        return
    ready = plan(load(environment.config_path()))
    check(ready)
    installer = Installer(ready.seams)
    ready.manager.hook.bcg_install_arguments(config=ready.config, seams=ready.seams, installer=installer)
    if _SCHEDULER in sys.modules:
        ready.manager.hook.bcg_install(
            config=ready.config, seams=ready.seams, reasons=ready.reasons, installer=installer
        )
        if multiprocessing.parent_process() is not None:
            installer.verify_later()
    _active = ready
    logger.info("sglang-bcg-dsa: on, %s; %s", ready.host, _line(ready.features))


def _line(decided: tuple[Feature, ...]) -> str:
    return ", ".join(f"{f.name} {f.state.value}" for f in decided)

