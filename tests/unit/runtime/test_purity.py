"""The pure rooms import nothing that knows time, chance, threads, files or the network."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).resolve().parents[3] / "runtime" / "ckpt_runtime"
PURE_ROOMS = ("checkpoint", "scheduler")
ALLOWED = {
    "__future__",
    "abc",
    "base64",
    "bisect",
    "collections",
    "contextlib",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "itertools",
    "json",
    "math",
    "msgspec",
    "re",
    "typing",
}
ALLOWED_ROOMS = {"checkpoint", "scheduler", "graph", "configuration", "version"}
"""The version is two constants, which metadata says."""
IMPURE_GRAPH_MODULES = {"ckpt_runtime.graph.specs"}
MODULES = [path for room in PURE_ROOMS for path in sorted((RUNTIME / room).rglob("*.py"))]


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"relative import in {path}"
            names.add(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_imports_are_pure(path: Path) -> None:
    for name in imported(path):
        if name.startswith("ckpt_runtime"):
            assert name.split(".")[1] in ALLOWED_ROOMS, f"{path.name} imports {name}"
            assert name not in IMPURE_GRAPH_MODULES, f"{path.name} imports {name}"
        else:
            assert name.split(".")[0] in ALLOWED, f"{path.name} imports {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_pure_rooms_do_not_print_open_or_evaluate(path: Path) -> None:
    calls = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"print", "open", "eval", "exec", "input", "__import__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_every_module_says_what_it_is(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text()))
