"""The only reader and writer of the process environment (a test enforces it). Standard library only.

The environment is the one channel that reaches every process of a server: SGLang spawns its
schedulers before a plugin could hand them anything else. The flags of the launching process are
therefore published here, and spawned children read them back.
"""

from __future__ import annotations

import os

from sglang_bcg_dsa.errors import ConfigError

ASKED = "SGLANG_BCG_DSA"
CONFIG = "SGLANG_BCG_DSA_CONFIG"
FAULT = "SGLANG_BCG_DSA_FAULT"
HOST_PLUGINS = "SGLANG_PLUGINS"
HOST_GRAPH_MEMORY_SAVER = "SGLANG_MEMORY_SAVER_CUDA_GRAPH"
HOST_SKIP_ALL_GATHER = "SGLANG_SCHEDULER_SKIP_ALL_GATHER"

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"", "0", "false", "no", "off"})


def asked() -> bool:
    """Whether this process was asked to run the plugin (``SGLANG_BCG_DSA``, set by the flag too)."""
    value = os.environ.get(ASKED, "")
    word = value.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise ConfigError(f"{ASKED}={value!r} is neither on (1, true, yes, on) nor off (0, false, no, off)")


def config_path() -> str | None:
    """The configuration file named by the environment, if any."""
    return os.environ.get(CONFIG) or None


def host_plugin_allowlist() -> frozenset[str] | None:
    """SGLang's own allow-list of plugins, or None when every installed plugin is loaded."""
    names = frozenset(n.strip() for n in os.environ.get(HOST_PLUGINS, "").split(",") if n.strip())
    return names or None


def skips_vote() -> bool:
    """Whether SGLang was told not to gather the ranks' votes."""
    return os.environ.get(HOST_SKIP_ALL_GATHER, "").strip().lower() in _TRUE


def saves_graph_memory() -> bool:
    """Whether SGLang's memory saver, if it is on, is to manage the memory of CUDA graphs too."""
    return os.environ.get(HOST_GRAPH_MEMORY_SAVER, "").strip().lower() in _TRUE


def fault() -> str:
    """The fault a rehearsal asked this process to show, or an empty string."""
    return os.environ.get(FAULT, "")


def publish(*, config: str | None) -> None:
    """Switch the plugin on in this process and in all it will spawn."""
    os.environ[ASKED] = "1"
    if config is not None:
        os.environ[CONFIG] = os.path.abspath(config)


def use_config(path: str) -> None:
    """Name the configuration file for the rest of this process, without switching anything on."""
    os.environ[CONFIG] = os.path.abspath(path)


def withdraw() -> None:
    """Switch the plugin off in this process and in all it will spawn."""
    os.environ.pop(ASKED, None)
    os.environ.pop(CONFIG, None)


def inherited() -> dict[str, str]:
    """A copy of the environment for a child process."""
    return dict(os.environ)
