"""Builds a checked plugin manager: our own features first, then installed third-party plugins.

Contract: a hook name or an argument name that the specs do not have is a PluginError naming the
plugin, at load. Nothing is registered globally; each call builds its own manager.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points
from typing import cast

import pluggy

from sglang_bcg_dsa.errors import PluginError
from sglang_bcg_dsa.hooks import PROJECT, specs

PREFIX = "bcg_"


def build_manager(builtin: Sequence[tuple[str, object]] = ()) -> pluggy.PluginManager:
    """A manager with ``builtin`` (name, plugin) pairs and every entry point of the group."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(specs)
    for name, plugin in builtin:
        add(manager, name, plugin)
    for entry in sorted(installed(), key=lambda e: e.name):
        try:
            plugin = entry.load()
        except Exception as error:
            raise PluginError(
                f"plugin {entry.name!r} ({entry.value}) of group {PROJECT!r} cannot be imported: {error}; "
                "repair it or uninstall its distribution"
            ) from error
        plugin = plugin() if inspect.isclass(plugin) else plugin
        add(manager, entry.name, plugin)
        if not manager.get_hookcallers(plugin):
            raise PluginError(f"plugin {entry.name!r} ({entry.value}) implements no hook; decorate them with @hookimpl")
    return manager


def installed() -> tuple[EntryPoint, ...]:
    """Third-party plugins: entry points of group ``sglang_bcg_dsa``."""
    return tuple(entry_points(group=PROJECT))


def add(manager: pluggy.PluginManager, name: str, plugin: object) -> None:
    """Register one plugin and check its hooks against the specs. Raises PluginError."""
    known = sorted(n for n in vars(specs) if n.startswith(PREFIX))
    for attribute in dir(plugin):
        if attribute.startswith(PREFIX) and attribute not in known and callable(getattr(plugin, attribute)):
            raise PluginError(f"plugin {name!r} implements {attribute}, which is no hook; known: {', '.join(known)}")
    try:
        manager.register(plugin, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(f"plugin {name!r} does not fit the hooks: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise PluginError(f"plugin {name!r} cannot be registered: {error}") from None


def declared_reasons(manager: pluggy.PluginManager) -> list[tuple[str, str]]:
    """(plugin name, reason) pairs of all plugins, for the reason table."""
    pairs = []
    for impl in manager.hook.bcg_reasons.get_hookimpls():
        try:
            declared = cast("Iterable[str] | None", impl.function())
        except Exception as error:
            raise PluginError(f"plugin {impl.plugin_name!r}: bcg_reasons raised {type(error).__name__}: {error}") from error
        if isinstance(declared, str):
            raise PluginError(f"plugin {impl.plugin_name!r}: bcg_reasons returned text, {declared!r}; expected names")
        pairs += [(impl.plugin_name, reason) for reason in dict.fromkeys(declared or ())]
    return pairs
