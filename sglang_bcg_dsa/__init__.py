"""Breakable CUDA graph prefill for DSA models on DeepEP under DP attention, as an SGLang plugin.

Importing this package costs nothing: neither torch, SGLang nor pluggy is loaded before a name is
used. The door SGLang opens is :func:`sglang_bcg_dsa.entry.register`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from sglang_bcg_dsa.hooks import hookimpl, hookspec

__version__ = "0.1.0"
__all__ = ["__version__", "hookimpl", "hookspec"]


def __getattr__(name: str) -> Any:
    """Load the pluggy markers on first use: every SGLang process imports this package."""
    if name in ("hookimpl", "hookspec"):
        from sglang_bcg_dsa import hooks

        return getattr(hooks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
