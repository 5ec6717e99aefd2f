"""Wraps seams through SGLang's HookRegistry, and verifies that the wraps are in force.

Contract: nothing is assigned into the host; HookRegistry does it when SGLang applies hooks, after
all plugins have loaded. SGLang logs and swallows what goes wrong there, so :meth:`verify` looks
at each target afterwards. It cannot be called by us at the right moment without applying hooks
early, which would shut out plugins that load after us; so the first of our hooks that runs calls
it, and a timer does where none ran.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from sglang_bcg_dsa.seams import Seam, SeamSet, resolve
from sglang_bcg_dsa.stopping import bring_down, refuse


class Installer:
    """Registers our wraps in this process and remembers them for :meth:`verify`."""

    def __init__(self, seams: SeamSet) -> None:
        self._seams = seams
        self._wraps: list[tuple[Seam, Callable[..., Any]]] = []
        self._verified = False

    def around(self, key: str, wrap: Callable[..., Any]) -> None:
        """Call ``wrap(original, *args, **kwargs)`` instead of the seam."""
        self._register(key, wrap, "AROUND")

    def after(self, key: str, wrap: Callable[..., Any]) -> None:
        """Call ``wrap(result, *args, **kwargs)`` after the seam; None keeps the result."""
        self._register(key, wrap, "AFTER")

    def _register(self, key: str, wrap: Callable[..., Any], how: str) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        seam = self._seams[key]

        @functools.wraps(wrap)
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.verify()
            return wrap(*args, **kwargs)

        HookRegistry.register(seam.target, hook, HookType[how])
        self._wraps.append((seam, hook))

    def verify_later(self, seconds: float = 30.0) -> None:
        """Verify from a thread, in case that none of our hooks took and so none will run.

        SGLang applies hooks within milliseconds of registering them; a model takes longer to load.
        """

        def check() -> None:
            try:
                self.verify()
            except SystemExit:
                bring_down()

        timer = threading.Timer(seconds, check)
        timer.daemon = True
        timer.start()

    @property
    def wrapped(self) -> tuple[str, ...]:
        """Keys of the seams wrapped in this process."""
        return tuple(seam.key for seam, _ in self._wraps)

    def verify(self) -> None:
        """Check once that every wrap is in force. Raises StartupError naming those that are not."""
        if self._verified:
            return
        lost = [seam for seam, hook in self._wraps if not _in_force(resolve(seam), hook)]
        if lost:
            raise refuse(
                "SGLang did not apply "
                + ", ".join(f"the hook on {seam.target} ({seam.why})" for seam in lost)
                + "; look for 'Failed to apply hooks' above, or for another plugin that replaced the target"
            )
        self._verified = True


def _in_force(target: Any, hook: Callable[..., Any]) -> bool:
    """Whether a chain of HookRegistry wrappers contains our hook."""
    function = getattr(target, "__func__", target)
    while function is not None:
        for cell in getattr(function, "__closure__", None) or ():
            if cell.cell_contents is hook:
                return True
        function = getattr(function, "__wrapped__", None)
    return False
