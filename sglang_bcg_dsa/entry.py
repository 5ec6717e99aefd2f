"""The door: SGLang calls :func:`register` in every process in which it loads plugins.

Contract: importing this module, and calling ``register`` when nobody asked for the plugin, loads
only the standard library and this package's own few names. Not asked for, the launching process
gets the two hooks behind ``--plugins``; every other process is left as it was.
"""

from __future__ import annotations

from sglang_bcg_dsa import environment
from sglang_bcg_dsa.errors import StartupError


def register() -> None:
    """SGLang's plugin entry point."""
    from multiprocessing import parent_process

    try:
        asked = environment.asked()
        if parent_process() is None:
            from sglang_bcg_dsa import flags

            flags.install()
        if asked:
            from sglang_bcg_dsa.activate import activate

            activate()
    except StartupError as error:
        error.announce()
        raise
