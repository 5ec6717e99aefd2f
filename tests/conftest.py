"""Shared by all tests. The suite runs inside the virtual environment of one real SGLang host."""

from __future__ import annotations

import gc
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "sglang_bcg_dsa"

# This suite needs no device, and a visible one would change what SGLang resolves.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
for name in [n for n in os.environ if n.startswith("SGLANG_BCG_DSA")]:
    del os.environ[name]

def import_host() -> None:
    """Import the host once, with its own and its libraries' warnings: those are not this suite's.

    Garbage is collected without looking at what the imports made, which took a third of the tests' own time.
    """
    from sglang_bcg_dsa.seams import SEAMS, examine

    gc.disable()
    fitting = examine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sorted({fitting[seam.key].module for seam in SEAMS if seam.key in fitting}):
            importlib.import_module(module)
    gc.freeze()
    gc.enable()


import_host()

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def fresh(tmp_path: Path) -> Run:
    """Run code, or arguments, in a fresh interpreter of this environment, in an empty folder."""

    def run(
        code: str | Sequence[str], *, env: dict[str, str] | None = None, path: Sequence[Path] = (), timeout: float = 120
    ) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", code] if isinstance(code, str) else [sys.executable, *code]
        python_path = os.pathsep.join(str(p) for p in path)
        return subprocess.run(
            argv,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **({"PYTHONPATH": python_path} if path else {}), **(env or {})},
        )

    return run


class Zygote:
    """Cases of ``tests/zygote.py``: the host's command line in a fresh fork of a process that has it loaded."""

    def __init__(self, process: subprocess.Popen[str], libraries: Path) -> None:
        self._process = process
        self.libraries = libraries

    def __call__(
        self, *argv: str, env: dict[str, str] | None = None, path: Sequence[Path] = (), code: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``launch_server`` or ``serve`` with arguments, or ``code``, after ``env`` and ``path``."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        order = {"argv": list(argv), "env": env or {}, "path": [str(p) for p in path], "code": code}
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = json.loads(self._process.stdout.readline())
        return subprocess.CompletedProcess(argv, answer["returncode"], answer["stdout"], answer["stderr"])


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """One process for all cases of a session."""
    from sglang_bcg_dsa.testing.models import write_model

    folder = tmp_path_factory.mktemp("zygote")
    model, libraries = write_model(folder, "dense"), folder / "libraries"
    with subprocess.Popen(
        [sys.executable, "-m", "tests.zygote", str(model), str(libraries)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        while line and line != "READY\n":
            line = process.stdout.readline()
        assert line, "the host cannot be imported"
        yield Zygote(process, libraries)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(30)


@pytest.fixture
def preload(zygote: Zygote) -> dict[str, str]:
    """The environment in which servers start as ``tests/preload/sitecustomize.py`` says: in half the time."""
    return {"BCG_DSA_TEST_PRELOAD": str(zygote.libraries), "PYTHONPATH": str(ROOT / "tests/preload")}
