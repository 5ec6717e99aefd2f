"""The folder that makes ``import deep_ep`` give the gloo stand-in. Imports nothing heavy."""

from __future__ import annotations

from pathlib import Path

# "bf16" means that rows cross as they are, whatever their type; the default is to quantise to FP8.
SERVER_ARGS = ("--moe-a2a-backend", "deepep", "--deepep-dispatcher-output-dtype", "bf16")

_SHIM = '''"""The gloo stand-in under DeepEP's name, for those with this folder on their path."""

from sglang_bcg_dsa.testing.deep_ep_gloo import Buffer, Config, EventOverlap

__all__ = ["Buffer", "Config", "EventOverlap"]
'''


def write_distribution(directory: str | Path) -> Path:
    """Write the package ``deep_ep`` into ``directory`` (to go on ``PYTHONPATH``) and return it.

    ``import deep_ep`` then gives the stand-in, provided ``sglang_bcg_dsa`` can be imported as well.
    """
    package = Path(directory) / "deep_ep"
    package.mkdir(parents=True, exist_ok=True)
    (package / "__init__.py").write_text(_SHIM, encoding="utf-8")
    return Path(directory)
