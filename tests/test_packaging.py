"""Wheel and sdist: built from setup.cfg alone, installed in an empty environment, nothing missing."""

from __future__ import annotations

import configparser
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from sglang_bcg_dsa import __version__
from tests.conftest import PACKAGE, ROOT
from tests.test_rehearsal import ALL, HOST_VOTES_ON_FACTS


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both archives, from a copy of the files that git knows."""
    source = tmp_path_factory.mktemp("src")
    files = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(out), str(source)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def test_nothing_strange_is_tracked() -> None:
    """The top level holds what the README speaks of, and no link leads out of the repository."""
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {line.partition("\t")[2].partition("/")[0] for line in listed} == {
        ".ci", ".gitignore", "LICENSE", "Makefile", "README.md", "bench", "pyproject.toml", "setup.cfg", PACKAGE.name, "tests",
    }  # fmt: skip
    assert not [line for line in listed if line.startswith("120000")]


def test_pyproject_names_the_build_system_only() -> None:
    """All metadata is in setup.cfg; pip needs the other file to exist."""
    lines = [line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.strip()]
    assert lines[0] == "[build-system]"
    assert len(lines) == 3


def test_metadata() -> None:
    """Entry point, script, extras, licence and types, as users and SGLang look for them."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert "bcg_dsa = sglang_bcg_dsa.entry:register" in config["options.entry_points"]["sglang.srt.plugins"]
    assert "sglang-bcg-dsa = sglang_bcg_dsa.cli:main" in config["options.entry_points"]["console_scripts"]
    assert {"host", "deepep", "plots", "test"} <= set(config["options.extras_require"])
    assert config["metadata"]["license"] == "Apache-2.0"
    assert "sglang" not in config["options"]["install_requires"], "the host is the user's; it is an extra"


# No archive depends on the host.
if ALL or not HOST_VOTES_ON_FACTS:

    def test_the_wheel_has_every_module_and_nothing_else(built: Path) -> None:
        """All of the package and its type marker; no tests, no caches."""
        (wheel,) = built.glob("*.whl")
        assert __version__ in wheel.name
        with zipfile.ZipFile(wheel) as archive:
            names = {n for n in archive.namelist() if ".dist-info/" not in n}
        expected = {str(p.relative_to(ROOT)) for p in PACKAGE.rglob("*.py")} | {"sglang_bcg_dsa/py.typed"}
        expected |= {str(p.relative_to(ROOT)) for p in (PACKAGE / "ops").iterdir()}
        assert names == expected

    def test_the_sdist_builds_again(built: Path) -> None:
        """The source archive has what its own build needs."""
        (sdist,) = built.glob("*.tar.gz")
        with tarfile.open(sdist) as archive:
            names = {n.partition("/")[2] for n in archive.getnames()}
        assert {"setup.cfg", "pyproject.toml", "README.md", "LICENSE", "sglang_bcg_dsa/seams.py"} <= names

    def test_it_installs_without_the_host(built: Path, tmp_path: Path) -> None:
        """In an environment without SGLang: the command runs, and doctor says what is missing, with status 1."""
        (wheel,) = built.glob("*.whl")
        subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "v")], check=True)
        python = tmp_path / "v" / "bin" / "python"
        done = subprocess.run(
            [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", str(wheel)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        script = tmp_path / "v" / "bin" / "sglang-bcg-dsa"
        shown = subprocess.run([str(script), "--version"], capture_output=True, text=True, check=True)
        assert __version__ in shown.stdout
        done = subprocess.run([str(script), "doctor"], capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        assert "package sglang is not installed" in done.stdout
        assert "Traceback" not in done.stdout + done.stderr
        done = subprocess.run([str(script), "rehearse"], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert "sglang" in done.stderr
        assert "Traceback" not in done.stderr
