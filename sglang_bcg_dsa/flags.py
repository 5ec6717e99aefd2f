"""``--plugins`` and ``--bcg-dsa-config``, on the command line and in SGLang's ``--config`` files.

Contract: bad values end the process with status 2 through argparse, before SGLang resolves
anything. A flag wins over the environment, the environment over the file. Naming ``bcg_dsa``
publishes the choice in the environment, which spawned children read. Which other plugins SGLang
loads is SGLang's business and is not changed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from sglang_bcg_dsa import environment
from sglang_bcg_dsa.errors import ConfigError, StartupError

NAME = "bcg_dsa"
GROUP = "sglang.srt.plugins"


def install() -> None:
    """Register the two hooks on ServerArgs. They are applied when SGLang applies its hooks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    owner = "sglang.srt.server_args.ServerArgs"
    HookRegistry.register(f"{owner}.add_cli_args", declare, HookType.AFTER)
    HookRegistry.register(f"{owner}.from_cli_args", take, HookType.AROUND)


def declare(result: None, parser: argparse.ArgumentParser) -> None:
    """Add the flags to SGLang's parser; ``--config`` files go through the same parser."""
    group = parser.add_argument_group("sglang-bcg-dsa")
    group.add_argument(
        "--plugins",
        type=plugin_names,
        nargs="+",
        metavar="NAMES",
        help=f"Comma-separated names of installed SGLang plugins that must be there; naming {NAME} switches it on.",
    )
    group.add_argument(
        "--bcg-dsa-config",
        type=config_file,
        metavar="FILE",
        help=f"TOML settings of the {NAME} plugin (environment: {environment.CONFIG}).",
    )


def take(original: Callable[..., Any], cls: type, args: argparse.Namespace) -> Any:
    """Act on the flags, then let SGLang resolve its arguments."""
    try:
        act(args)
    except StartupError as error:
        error.announce()
        raise
    return original(cls, args)


def act(args: argparse.Namespace) -> None:
    """Publish what the flags say, and switch the plugin on in this process if it is asked for."""
    named = {name for names in getattr(args, "plugins", None) or () for name in names}
    config = getattr(args, "bcg_dsa_config", None)
    if NAME in named:
        environment.publish(config=config)
    elif config is not None:
        if not environment.asked():
            raise ConfigError(f"--bcg-dsa-config {config} has no effect without --plugins {NAME}; add it")
        environment.publish(config=config)
    if environment.asked():
        from sglang.srt.plugins.hook_registry import HookRegistry

        from sglang_bcg_dsa.activate import activate

        activate()
        # SGLang applied its hooks before it parsed its arguments; ours came with the arguments.
        HookRegistry.apply_hooks()


def plugin_names(text: str) -> list[str]:
    """The value of ``--plugins``. Every name must be installed and not shut out by SGLang."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    available = sorted({entry.name for entry in entry_points(group=GROUP)})
    if not names:
        raise argparse.ArgumentTypeError(f"no plugin is named; installed: {', '.join(available)}")
    allowed = environment.host_plugin_allowlist()
    for name in names:
        if name not in available:
            raise argparse.ArgumentTypeError(f"{name!r} is not installed; installed: {', '.join(available)}")
        if allowed is not None and name not in allowed:
            raise argparse.ArgumentTypeError(
                f"{name!r} is shut out by {environment.HOST_PLUGINS}={','.join(sorted(allowed))}; add it there"
            )
    return names


def config_file(text: str) -> str:
    """The value of ``--bcg-dsa-config``, checked as a whole."""
    from sglang_bcg_dsa.config import load

    try:
        load(text or "(empty)")
    except ConfigError as error:
        raise argparse.ArgumentTypeError(error.message) from None
    return text
