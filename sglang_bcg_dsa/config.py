"""Every setting, once, frozen: a TOML file with one table per feature.

Contract: an unknown table or key, a wrong type or a bad value is a :class:`ConfigError` that
names file, line, key and what was expected. Precedence (flag, environment, file, default) is
decided by the callers; this module only reads one document.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from sglang_bcg_dsa.errors import ConfigError

Enabled = bool | Literal["auto"]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86400)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One feature's table. ``enabled``: true (or stop with the reason), false, or "auto"."""

    enabled: Enabled = "auto"


class Attention(_Table, frozen=True, kw_only=True):
    """``[attention]``: the DSA and DSV4 attention backends."""


class Moe(_Table, frozen=True, kw_only=True):
    """``[moe]``: the DeepEP MoE break.

    ``barrier_seconds``: how long ranks wait for each other before a break while capturing; kernels
    are compiled then, up to 4 minutes on a fresh H200 (measured).
    """

    barrier_seconds: Seconds = 600.0


class Vote(_Table, frozen=True, kw_only=True):
    """``[vote]``: one predicate for the scheduler's vote and the forward-time check."""


class Rules(_Table, frozen=True, kw_only=True):
    """``[rules]``: which configurations may use prefill graphs, buckets, memory reserve."""


class Explain(_Table, frozen=True, kw_only=True):
    """``[explain]``: counters, ``/server_info`` and the summary line in the log.

    ``summary_seconds``: how often the summary line is written while there are prefill forwards.
    ``zero_coverage_after``: warn once this many prefill forwards ran without a single replay.
    """

    summary_seconds: Seconds = 60.0
    zero_coverage_after: Annotated[int, msgspec.Meta(ge=1)] = 20


class Audit(_Table, frozen=True, kw_only=True):
    """``[audit]``: lockstep check, exchange of features between ranks, stall reports.

    ``exchange_seconds``: how long a rank waits at start for the others' feature records. Ranks of
    one tensor-parallel group have just left a barrier; pipeline stages may be minutes apart.
    ``stall_seconds``: when a receipt of requests, a vote, a forward or a wait for its results lasts
    this long on any rank, all ranks report and the server is stopped. Kernel compilation takes up to
    4 minutes on a fresh H200 (measured), hence the default.
    """

    exchange_seconds: Seconds = 300.0
    stall_seconds: Seconds = 300.0


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All settings. The field names are the tables of the file and the names of the features."""

    attention: Attention = msgspec.field(default_factory=Attention)
    moe: Moe = msgspec.field(default_factory=Moe)
    vote: Vote = msgspec.field(default_factory=Vote)
    rules: Rules = msgspec.field(default_factory=Rules)
    explain: Explain = msgspec.field(default_factory=Explain)
    audit: Audit = msgspec.field(default_factory=Audit)

    def enabled(self, feature: str) -> Enabled:
        """What the configuration says about one feature."""
        table: _Table = getattr(self, feature)
        return table.enabled


FEATURES: tuple[str, ...] = Config.__struct_fields__


def load(path: str | None) -> Config:
    """Read one TOML file, or the defaults when ``path`` is None.

    Raises ConfigError for anything but a readable, valid document.
    """
    if path is None:
        return Config()
    file = Path(path)
    try:
        text = file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise ConfigError(f"configuration file {path}: no such file; give an existing TOML file") from None
    except IsADirectoryError:
        raise ConfigError(f"configuration file {path} is a directory; give a TOML file") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"configuration file {path} is not text (byte {error.start} is not UTF-8); give a TOML file"
        ) from None
    except OSError as error:
        raise ConfigError(f"configuration file {path} cannot be read: {error.strerror}") from None
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration file {path} is not TOML: {error}") from None
    try:
        return msgspec.convert(document, Config)
    except msgspec.ValidationError as error:
        raise ConfigError(_explain(path, text, document, str(error))) from None


def _explain(path: str, text: str, document: dict[str, object], error: str) -> str:
    """Turn a validation error into file, line, key, found and expected."""
    what, _, where = error.partition(" - at `$")
    keys = [k for k in where.rstrip("`").strip(".").split(".") if k]
    unknown = re.search(r"unknown field `([^`]+)`", what)
    if unknown:
        keys.append(unknown.group(1))
        parent = Config if len(keys) == 1 else type(getattr(Config(), keys[0]))
        kind = "table" if len(keys) == 1 else "key"
        problem = f"unknown {kind}; known: {', '.join(parent.__struct_fields__)}"
    else:
        value: object = document
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        problem = f"{value!r} is wrong: {what[:1].lower()}{what[1:]}"
        if keys[-1:] == ["enabled"]:
            problem = f'{value!r} is wrong: expected true, false or "auto"'
    return f"{path}:{_line_of(text, keys)}: [{'] '.join(keys[:1])}]{''.join(' ' + k for k in keys[1:])}: {problem}"


def _line_of(text: str, keys: list[str]) -> int:
    """The line where a key stands, or its table's, or 1: TOML parsers do not keep positions."""
    table, found = "", 1
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*\[\s*([^\]]+?)\s*\]", line)
        if header:
            table = header.group(1).strip("\"'")
            if keys and table == keys[0]:
                found = number
                if len(keys) == 1:
                    return number
            continue
        name = re.match(r"\s*([\w.\-\"']+)\s*=", line)
        if name:
            path = [*([table] if table else []), *name.group(1).replace('"', "").split(".")]
            if path == keys or (len(path) < len(keys) and path == keys[: len(path)]):
                return number
    return found
