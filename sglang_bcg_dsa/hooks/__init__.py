"""The markers every plugin of ours, builtin or third-party, decorates its hooks with."""

from __future__ import annotations

import pluggy

PROJECT = "sglang_bcg_dsa"
"""Name of the pluggy project and of the entry point group of third-party plugins."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)
