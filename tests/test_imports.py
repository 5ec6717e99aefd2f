"""The shape of the package: imports go one way, one reader of the environment, host names in few places."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.conftest import PACKAGE, ROOT

# Lower may not import higher. Modules of one level may not import each other, but for the listed exceptions.
LEVELS: list[set[str]] = [
    {"errors", "source"},
    {"environment", "buckets", "reasons", "config", "exchange", "breaks", "metadata", "traffic",
     "memory"},
    {"predicate", "rules", "seams", "engine", "stopping"},
    {"vote"},
    {"records", "installer", "hostfacts", "progress"},
    {"hooks", "backends", "rollcall"},
    {"features", "flags", "ledger", "backends.dsv4_tables"},
    {"hooks.specs", "metrics"},
    {"hooks.manager", "backends.deepep", "backends.dsa", "backends.dsv4"},
    {"hooks.vote", "hooks.explain", "hooks.audit", "hooks.moe", "hooks.attention", "hooks.rules"},
    {"activate"},
    {"entry", "doctor", "testing"},
    {"bench_rank", "report"},
    {"rehearse", "bench", "compare"},
    {"chaos"},
    {"show", "plots"},
    {"cli"},
]
RANK = {name: level for level, names in enumerate(LEVELS) for name in names}
FILES = sorted(p for p in PACKAGE.rglob("*.py"))


def module_of(path: Path) -> str:
    parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
    if parts[-1] == "__init__":
        parts.pop()
    name = ".".join(parts)
    return "testing" if name.startswith("testing") else name


def imports(path: Path) -> list[tuple[str, bool]]:
    """(dotted name, whether it runs when the module is imported) of every import in a file."""
    found = []
    tree = ast.parse(path.read_text())
    late = {
        id(leaf)
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for leaf in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) not in late) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [(f"{node.module}.{alias.name}", id(node) not in late) for alias in node.names]
    return found


def ours(name: str) -> str | None:
    """The module of ours that an import names, or None."""
    if name.partition(".")[0] != "sglang_bcg_dsa":
        return None
    parts = name.split(".")[1:]
    if parts[:1] == ["testing"]:
        return "testing"
    while parts and ".".join(parts) not in RANK:
        parts.pop()
    return ".".join(parts) or None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    """Every import of ours goes to a lower level, in functions too: no cycles, no reaching up."""
    me = module_of(path)
    if me == "":
        return
    assert me in RANK, f"{me} has no level; decide what it may know"
    for name, _ in imports(path):
        target = ours(name)
        if target is None or target == me:
            continue
        # The door opens the rest; flags switch the plugin on; faults are plugins of our hooks.
        if (me, target) in {("flags", "activate"), ("entry", "flags"), ("testing", "hooks")}:
            continue
        assert RANK[target] < RANK[me], f"{me} (level {RANK[me]}) imports {target} (level {RANK[target]})"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_host_and_torch_are_imported_where_they_may_be(path: Path) -> None:
    """SGLang at import time in the engine adapter alone; torch in modules that handle tensors."""
    me = module_of(path)
    at_import = {name.partition(".")[0] for name, now in imports(path) if now}
    if me != "testing":
        assert "sglang" not in at_import or me == "engine"
        tensors = {"breaks", "engine", "metadata", "backends.deepep", "backends.dsa", "backends.dsv4", "backends.dsv4_tables"}
        assert "torch" not in at_import or me in tensors


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_the_environment_has_one_reader(path: Path) -> None:
    """os.environ and os.getenv only in ``environment``, and in the CPU platform's ``settings`` and ``server``."""
    relative = str(path.relative_to(PACKAGE))
    if relative in {"environment.py", "testing/settings.py", "testing/server.py"}:
        return
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in {"os.environ", "os.getenv", "os.putenv"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_nothing_is_swallowed(path: Path) -> None:
    """No handler is empty or bare, and none catches everything without a reason written beside it."""
    text = path.read_text().splitlines()
    for node in ast.walk(ast.parse("\n".join(text))):
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"{path}:{node.lineno}: bare except"
            assert not (len(node.body) == 1 and isinstance(node.body[0], ast.Pass)), f"{path}:{node.lineno}: swallowed"
            if ast.unparse(node.type) in {"Exception", "BaseException"}:
                body = ast.unparse(ast.Module(node.body, []))
                assert "#" in text[node.lineno - 1] or "raise" in body, f"{path}:{node.lineno}: why everything?"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_and_public_names_say_their_contract(path: Path) -> None:
    """Every module and every public class and function has a docstring."""
    tree = ast.parse(path.read_text())
    if path.read_text().strip():
        assert ast.get_docstring(tree), path
    for node in tree.body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{path}: {node.name}"


def test_versions_are_never_compared() -> None:
    """Capabilities decide; the host's version appears in messages only."""
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Compare):
                assert "version" not in ast.unparse(node).lower(), f"{path}:{node.lineno}"


def test_the_project_names_nobody_s_machine() -> None:
    """No path, host or tool of the place where it was written."""
    for path in [*FILES, *ROOT.glob("tests/*"), ROOT / "README.md", ROOT / "Makefile", ROOT / ".ci/run"]:
        if path.is_file() and path.name != "test_imports.py":
            assert "/work/" not in path.read_text(), path
