"""``doctor``: what the plugin would do on this machine, and what stands in its way.

Contract: imports neither torch nor SGLang, needs no GPU, changes nothing. Exit status 0 when
everything that was asked for can run, else 1.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points
from typing import Any

from sglang_bcg_dsa import __version__, environment
from sglang_bcg_dsa.activate import Plan, check, plan
from sglang_bcg_dsa.config import load
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.flags import GROUP, NAME
from sglang_bcg_dsa.hooks import PROJECT
from sglang_bcg_dsa.hooks.manager import installed
from sglang_bcg_dsa.records import State
from sglang_bcg_dsa.seams import SEAMS


@dataclass(frozen=True)
class Part:
    """Something installed, or not, and what that costs."""

    name: str
    found: str | None
    without: str


_PARTS = (
    ("sglang", "sglang", "nothing works: it is the host"),
    ("torch", "torch", "nothing works: the host needs it"),
    ("deep_ep", "deep_ep", "no DeepEP all-to-all: MoE models run with --moe-a2a-backend none"),
    ("flashinfer", "flashinfer", "no FlashInfer kernels; `bench` cannot time the GPU"),
    ("deep_gemm", "deep_gemm", "no FP8 grouped GEMM for DeepEP and no DSA indexer on the GPU"),
    ("pluggy", "pluggy", "nothing works: our features are its plugins"),
)


def parts() -> list[Part]:
    """Python packages and devices the plugin can use."""
    found = [Part(name, _version_of(module), without) for name, module, without in _PARTS]
    return [*found, Part("GPU", _gpu(), "no serving; `rehearse` runs the real server on this CPU")]


def examine() -> tuple[Plan, list[Part], str | None]:
    """The plan for this machine, its parts, and why the plugin would refuse to start, if it would."""
    decided = plan(load(environment.config_path()))
    try:
        _check_loadable()
        check(decided)
    except StartupError as error:
        return decided, parts(), str(error)
    return decided, parts(), None


def _check_loadable() -> None:
    """What the plugin itself cannot notice at start, because SGLang would not load it."""
    allowed = environment.host_plugin_allowlist()
    if allowed is not None and NAME not in allowed:
        raise StartupError(
            f"{environment.HOST_PLUGINS}={','.join(sorted(allowed))} shuts {NAME} out: SGLang will not load it, whatever "
            f"--plugins or {environment.ASKED} say; add {NAME} there"
        )
    if NAME not in {entry.name for entry in entry_points(group=GROUP)}:
        raise StartupError(f"no entry point {NAME} in group {GROUP}; install sglang-bcg-dsa with pip, do not just copy it")


def third_party(decided: Plan) -> list[tuple[str, list[str]]]:
    """(name, hooks it implements) of every third-party plugin."""
    manager = decided.manager
    names = {entry.name for entry in installed()}
    return [
        (name, sorted(caller.name for caller in manager.get_hookcallers(plugin) or ()))
        for name, plugin in manager.list_name_plugin()
        if plugin is not None and name in names
    ]


def as_json(decided: Plan, found: list[Part], refusal: str | None) -> dict[str, Any]:
    """Everything ``doctor`` knows, in builtin types."""
    return {
        "plugin": __version__,
        "python": sys.version.split()[0],
        "host": decided.host,
        "ok": refusal is None,
        "refusal": refusal,
        "features": [{"name": f.name, "state": f.state.value, "reason": f.reason} for f in decided.features],
        "seams": {
            "rows": len({s.key for s in SEAMS}),
            "fitting": len({s.key for s in SEAMS if s.key in decided.seams}),
            "mismatches": [{"key": m.key, "feature": m.feature, "found": str(m)} for m in decided.seams.mismatches],
        },
        "parts": [{"name": p.name, "found": p.found, "without": None if p.found else p.without} for p in found],
        "plugins": {
            GROUP: sorted({e.name for e in entry_points(group=GROUP)}),
            PROJECT: dict(third_party(decided)),
        },
        "registered": NAME in {e.name for e in entry_points(group=GROUP)},
        "config": environment.config_path(),
    }


STYLES = {
    State.SUPPLIED: "green", State.EXTENDED: "green", State.NATIVE: "cyan", State.OFF: "yellow", State.REFUSED: "red",
}  # fmt: skip


def _version_of(module: str) -> str | None:
    if importlib.util.find_spec(module) is None:
        return None
    names = {
        "deep_ep": ("deep-ep", "deep_ep", "sgl-deep-ep"),
        "flashinfer": ("flashinfer-python",),
        "deep_gemm": ("sgl-deep-gemm", "deep-gemm"),
    }
    for name in names.get(module, (module,)):
        try:
            return distribution(name).version
        except PackageNotFoundError:
            continue
    return "present"


def _gpu() -> str | None:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    try:
        answer = subprocess.run(
            [tool, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, timeout=20, check=False
        )
    except subprocess.TimeoutExpired:
        return None
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return f"{len(names)} x {names[0]}" if answer.returncode == 0 and names else None
