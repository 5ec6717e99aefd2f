"""The seam table against the installed host, a host that does not fit, and hosts that were changed."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import shutil
import sys
from pathlib import Path

import pytest

from sglang_bcg_dsa import seams, source
from sglang_bcg_dsa.features import WORKING_RELEASES
from sglang_bcg_dsa.seams import SEAMS, Kind, Seam, examine
from tests.conftest import Run
from tests.test_rehearsal import ALL, HOST_VOTES_ON_FACTS

OLD_HOST = "BCG_DSA_TEST_OLD_HOST"
"""Folder of an unpacked sglang 0.5.12, set by the suite's driver."""


def test_every_row_says_why_where_and_until_when() -> None:
    """A seam nobody can explain cannot be kept or removed."""
    for seam in SEAMS:
        assert len(seam.why) > 15, seam.key
        assert len(seam.remove_when) > 15, seam.key
        assert seam.hosts, seam.key
        assert seam.path.count(":") == 1, seam.key
    assert len({(s.key, s.path) for s in SEAMS}) == len(SEAMS)


def test_the_installed_host_fits() -> None:
    """Every seam of every feature fits the host this suite runs in."""
    found = examine()
    assert found.mismatches == (), "\n".join(map(str, found.mismatches))


def test_source_and_import_agree() -> None:
    """What is found in source is what the imported host has: the check does not look past a re-export."""
    found = examine()
    for key in {s.key for s in SEAMS if s.key in found}:
        seam = found[key]
        if seam.kind in (Kind.HOOK, Kind.CALL, Kind.VALUE):
            seams.resolve(seam)


@pytest.fixture
def copy_of_host(tmp_path: Path) -> Path:
    """The files that the table names, in a package of the same name that can be changed."""
    root = source.root_of("sglang")
    target = tmp_path / "sglang"
    for module in {s.module for s in SEAMS}:
        for name in ("/".join(module.split(".")[1:]) + ".py", "/".join(module.split(".")[1:]) + "/__init__.py"):
            if (root / name).is_file():
                (target / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, target / name)
    for folder in [target, *[p for p in target.rglob("*") if p.is_dir()]]:
        (folder / "__init__.py").touch()
    base = "srt/model_executor/runner"
    shutil.copytree(root / base, target / base, dirs_exist_ok=True)
    return tmp_path


CHANGES = [
    ("srt/managers/scheduler_components/dp_attn.py", "def all_gather(", "def gather_all(", "vote.gather", "no all_gather"),
    (
        "srt/managers/scheduler_components/dp_attn.py", "def prepare_mlp_sync_batch(self, local_batch",
        "def prepare_mlp_sync_batch(self, batch", "vote.batch", "parameters are (self, batch), expected (self, local_batch",
    ),
    (
        "srt/model_executor/runner/prefill_cuda_graph_runner.py", "self.capture_num_tokens =", "self.ladder =",
        "runner.fact.capture_num_tokens", "has no capture_num_tokens",
    ),
    (
        "srt/model_executor/runner/prefill_cuda_graph_runner.py", "_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR = 2",
        "PADDING = 2", "runner.padding", "no _MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR",
    ),
    ("srt/managers/scheduler.py", "class Scheduler(", "class Planner(", "scheduler.state", "no class Scheduler"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "key", "words"), CHANGES)
def test_a_changed_host_is_refused_by_the_seam_that_changed(
    copy_of_host: Path, fresh: Run, file: str, old: str, new: str, key: str, words: str
) -> None:
    """Renamed, re-ordered or gone: ``doctor`` names the seam and what is there instead, and exits 1."""
    path = copy_of_host / "sglang" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    done = fresh(["-m", "sglang_bcg_dsa.cli", "doctor", "--json"], path=[copy_of_host])
    assert done.returncode == 1, done.stderr
    import json

    report = json.loads(done.stdout)
    found = {m["key"]: m["found"] for m in report["seams"]["mismatches"]}
    assert words in found[key]
    assert key in report["refusal"]
    assert WORKING_RELEASES in report["refusal"]


def test_the_unchanged_copy_fits(copy_of_host: Path, fresh: Run) -> None:
    """The test above fails for its change, not because it looks at a copy."""
    done = fresh(["-m", "sglang_bcg_dsa.cli", "doctor", "--json"], path=[copy_of_host])
    assert done.returncode == 0, done.stdout + done.stderr


# What is beside it does not matter to a release that is refused.
if ALL or not HOST_VOTES_ON_FACTS:

    def test_a_release_that_does_not_fit_is_refused_naming_everything(fresh: Run) -> None:
        """0.5.12 has the plugin API but not the runner: exit at start, each mismatch named, and what fits."""
        old = os.environ.get(OLD_HOST)
        assert old, f"{OLD_HOST} must name an unpacked sglang 0.5.12; `make test` sets it"
        done = fresh(
            "from sglang_bcg_dsa.entry import register; register()", path=[Path(old)], env={"SGLANG_BCG_DSA": "1"}
        )
        assert done.returncode == 2, done.stdout + done.stderr
        assert "lacks" in done.stderr
        assert "vote.gather" in done.stderr
        assert "forward.decide" in done.stderr
        assert WORKING_RELEASES in done.stderr
        assert "Traceback" not in done.stderr


def package(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "__init__.py").write_text(text)


def test_variants_of_a_seam_are_alternatives(tmp_path: Path) -> None:
    """The first row that fits is used; when none does, all that were tried are named."""
    sys.path.insert(0, str(tmp_path))
    try:
        package(tmp_path / "fake_host_v", "class A:\n    new: int = 0\n")
        row = Seam("k", "vote", Kind.ATTRIBUTE, "fake_host_v:A.old", "why it is needed", "when it can be removed")
        fits = examine([row, dataclasses.replace(row, path="fake_host_v:A.new")])
        assert fits.field("k") == "new"
        both = examine([row, dataclasses.replace(row, path="fake_host_v:B.new")])
        assert str(both.mismatches[0]) == "fake_host_v:A.old: A has no old; or fake_host_v:B.new: no class B in fake_host_v"
        assert examine([dataclasses.replace(row, optional=True)]).mismatches == ()
    finally:
        sys.path.remove(str(tmp_path))


@pytest.mark.parametrize("collects", [True, False])
@pytest.mark.parametrize("text", ["x = 1\n", "x =\n"])
def test_reading_leaves_the_collector_of_garbage_as_it_was(tmp_path: Path, text: str, collects: bool) -> None:
    """Also when a file is no Python: a server that does not collect any more grows without end."""
    (tmp_path / "m.py").write_text(text)
    before = gc.isenabled()
    (gc.enable if collects else gc.disable)()
    try:
        with contextlib.suppress(SyntaxError):
            source._parse(tmp_path / "m.py")
        assert gc.isenabled() is collects
    finally:
        (gc.enable if before else gc.disable)()


def test_inherited_and_conditional_names_are_found(tmp_path: Path) -> None:
    """Bases in other modules, names under ``if`` and ``try``: as Python would find them."""
    sys.path.insert(0, str(tmp_path))
    try:
        package(tmp_path / "fake_base_s", "class Base:\n    def go(self):\n        self.deep = (self.x, y) = 1, 2\n")
        package(
            tmp_path / "fake_top_s",
            "from fake_base_s import Base as B\nif True:\n    LIMIT = 2\ntry:\n    import json\nexcept ImportError:\n"
            "    json = None\nclass Top(B):\n    field: int\n    @property\n    def prop(self): ...\n"
        )
        given = source.given_to_instances("fake_top_s", "Top")
        assert {"deep", "x", "field", "prop", "go"} <= given
        assert "y" not in given
        assert {"LIMIT", "json", "Top", "B"} <= source.names_in("fake_top_s")
        with pytest.raises(source.Absent, match="no module fake_top_s.missing"):
            source.tree_of("fake_top_s.missing")
    finally:
        sys.path.remove(str(tmp_path))
