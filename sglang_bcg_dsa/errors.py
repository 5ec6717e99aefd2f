"""How this package says no.

Contract: every error names what was found, where, what was expected and what to do. Start-up
errors derive from :class:`SystemExit`, because SGLang logs and swallows ``Exception`` from a
plugin and would go on without it; errors of a running server derive from ``RuntimeError``, which
SGLang's scheduler turns into the end of the server.
"""

from __future__ import annotations

import sys


class StartupError(SystemExit):
    """The plugin was asked for and cannot run: ends the process with status 2 and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = f"sglang-bcg-dsa: {message}"

    def __str__(self) -> str:
        return self.message

    def announce(self) -> None:
        """Print the message: Python ends silently when SystemExit carries a status."""
        print(self.message, file=sys.stderr, flush=True)


class ConfigError(StartupError):
    """A setting is wrong: file, line, key, what was expected."""


class HostMismatch(StartupError):
    """The installed SGLang does not have the seams this plugin needs."""


class PluginError(StartupError):
    """A plugin of our hooks is wrong: unknown hook, unknown argument, duplicate reason."""


class CaptureError(RuntimeError):
    """Refused while capturing what would have corrupted a replay."""


class MetadataError(RuntimeError):
    """Attention metadata does not keep its contract; names the field."""


class LockstepError(RuntimeError):
    """Ranks were about to take different paths into a collective."""


class VetoError(RuntimeError):
    """A plugin refused a batch with a reason that was never declared."""
