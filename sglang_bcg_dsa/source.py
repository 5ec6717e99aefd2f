"""Read a package's source without importing it: classes, functions, what instances are given.

Contract: nothing here executes the code it looks at. SGLang's modules take ten seconds to import
and some refuse to on a machine without a GPU; their syntax trees take one and never refuse. The
price: a name that is made at run time is not seen, so a seam must name one that stands in source.
"""

from __future__ import annotations

import ast
import gc
import importlib.util
from functools import cache
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Absent(LookupError):
    """What was looked for is not there; the message says what is missing, and where."""


@cache
def root_of(package: str) -> Path:
    """The folder of an installed top-level package. Raises Absent when it is not installed."""
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise Absent(f"package {package} is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


@cache
def tree_of(module: str) -> ast.Module:
    """The syntax tree of a module, found by its dotted name. Raises Absent."""
    top, *rest = module.split(".")
    base = root_of(top).joinpath(*rest)
    for file in (base / "__init__.py", base.with_suffix(".py")):
        if file.is_file():
            return _parse(file)
    raise Absent(f"no module {module}")


def _parse(file: Path) -> ast.Module:
    """Without collections of garbage: a tree makes none, and with a host loaded they are half of the time."""
    collects = gc.isenabled()
    gc.disable()
    try:
        return ast.parse(file.read_text(encoding="utf-8"), str(file))
    finally:
        if collects:
            gc.enable()


@cache
def names_in(module: str) -> frozenset[str]:
    """Every name a module binds at its top level, imports included."""
    found: set[str] = set()
    for node in _statements(tree_of(module).body):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        else:
            found.update(_bound(node))
    return frozenset(found)


@cache
def class_of(module: str, name: str) -> tuple[str, ast.ClassDef]:
    """A class and the module that defines it, following imports. Raises Absent."""
    for node in _statements(tree_of(module).body):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return class_of(node.module, alias.name)
    raise Absent(f"no class {name} in {module}")


def function_in(module: str, qualified: str) -> Function:
    """A module's function, or a method that the named class itself defines. Raises Absent."""
    owner, _, name = qualified.rpartition(".")
    body = class_of(module, owner)[1].body if owner else tree_of(module).body
    for node in _statements(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return node
    raise Absent(f"no {name} in {owner or module}")


def parameters(function: Function) -> tuple[str, ...]:
    """Names of a function's parameters in order: positional, then keyword-only."""
    given = function.args
    return tuple(a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs))


def given_to_instances(module: str, name: str) -> frozenset[str]:
    """Names that a class and its bases declare, define or assign on ``self``.

    A base that cannot be found in source (a third-party class) adds nothing.
    """
    return _given(*class_of(module, name))


@cache
def _given(module: str, node: ast.ClassDef) -> frozenset[str]:
    found: set[str] = set()
    for statement in _statements(node.body):
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.add(statement.name)
            for leaf in ast.walk(statement):
                if (
                    isinstance(leaf, ast.Attribute)
                    and isinstance(leaf.ctx, ast.Store)
                    and isinstance(leaf.value, ast.Name)
                    and leaf.value.id == "self"
                ):
                    found.add(leaf.attr)
        else:
            found.update(_bound(statement))
    for base in node.bases:
        if isinstance(base, ast.Name):
            try:
                found |= _given(*class_of(module, base.id))
            except Absent:
                continue
    return frozenset(found)


def _bound(node: ast.stmt) -> set[str]:
    """Names an assignment statement binds."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, ast.AnnAssign):
        targets = [node.target]
    return {leaf.id for target in targets for leaf in ast.walk(target) if isinstance(leaf, ast.Name)}


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """The statements of a body, with those under ``if`` and ``try`` brought up."""
    flat: list[ast.stmt] = []
    for node in body:
        if isinstance(node, ast.If):
            typing_only = "TYPE_CHECKING" in ast.unparse(node.test)
            flat += ([] if typing_only else _statements(node.body)) + _statements(node.orelse)
        elif isinstance(node, ast.Try):
            flat += _statements(node.body)
            for handler in node.handlers:
                flat += _statements(handler.body)
        else:
            flat.append(node)
    return flat
