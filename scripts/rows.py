"""Traceability: which tests prove which row of the designs.

Prints one line for each row of ``tests/rows.toml``: its id, ``proven`` or ``open``, how many tests carry it, and their
names; the missing part of an open row is printed last. Fails when a page of the documentation claims a row, as
``[571.3]``, that is unknown or open, when a promise that names its tests claims a row that none of them carries, and
when a test carries a row that does not exist.

It reads the sources and runs none of them.
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROW_ID = re.compile(r"[a-z0-9]+\.\d+")
CLAIM = re.compile(r"\[((?:\d+|air|ends|io|ps)\.\d+)\](?![(\[:])")
NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py::[\w:]+)`")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(slots=True)
class Row:
    """``missing`` is what of the row does not exist yet; ``tests`` are named as pytest names them."""

    id: str
    title: str
    missing: str = ""
    tests: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        return bool(self.tests) and not self.missing

    def __str__(self) -> str:
        names = ", ".join(test.removeprefix("tests/") for test in self.tests)
        note = f"missing: {self.missing}" if self.missing else ""
        state = "proven" if self.proven else "open"
        parts = [f"{self.id:<7}{state:<7}{len(self.tests):>3}", names, note]
        return "  ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class Claim:
    """A row that a page claims; ``named`` are the tests that the same line names."""

    row: str
    where: str
    named: tuple[str, ...]


def read_rows(root: Path) -> dict[str, Row]:
    """All rows, in the order of the file. Raises ValueError for entries that are none."""
    rows = {}
    for design, entries in tomllib.loads((root / "tests" / "rows.toml").read_text("utf-8")).items():
        for row_id, entry in entries.items():
            if not ROW_ID.fullmatch(row_id) or row_id in rows or not entry.get("title"):
                raise ValueError(f"tests/rows.toml, {design}: {row_id!r} needs an id of its own and a title")
            if not set(entry) <= {"title", "missing"}:
                raise ValueError(f"tests/rows.toml, {design}: {row_id!r} takes 'title' and 'missing' only")
            rows[row_id] = Row(row_id, **entry)
    return rows


def tests_by_row(root: Path) -> Iterator[tuple[str, str]]:
    """(row, test) for every mark in every test file. Raises ValueError for a mark that cannot be read."""
    for path in sorted((root / "tests").rglob("test_*.py")):
        file = path.relative_to(root).as_posix()
        module = ast.parse(path.read_text("utf-8"), file)
        everywhere = _rows_of_module(module, file)
        for name, test, inherited in _tests(module, file, everywhere):
            for row in dict.fromkeys([*inherited, *_marks(test, file)]):
                yield row, f"{file}::{name}"


def _tests(module: ast.Module, file: str, everywhere: list[str]) -> Iterator[tuple[str, ast.AST, list[str]]]:
    for node in module.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            yield node.name, node, everywhere
        elif isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            own = [row for decorator in node.decorator_list for row in _marks(decorator, file)]
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name.startswith("test_"):
                    yield f"{node.name}::{item.name}", item, [*everywhere, *own]


def _rows_of_module(module: ast.Module, file: str) -> list[str]:
    found = []
    for node in module.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "pytestmark" for t in node.targets):
            found += _marks(node.value, file)
    return found


def _marks(tree: ast.AST, file: str) -> list[str]:
    """Arguments of ``pytest.mark.row`` anywhere inside: decorators and parameters alike."""
    return [
        row
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.row"
        for row in _ids(node, file)
    ]


def _ids(call: ast.Call, file: str) -> list[str]:
    found = [
        argument.value
        for argument in call.args
        if isinstance(argument, ast.Constant) and isinstance(argument.value, str)
    ]
    if call.keywords or not found or len(found) != len(call.args):
        raise ValueError(f"{file}:{call.lineno}: pytest.mark.row takes literal ids")
    return found


def claims(root: Path) -> Iterator[Claim]:
    """The claims of the pages, without fenced blocks."""
    for page in sorted([*root.glob("*.md"), *(root / "docs").rglob("*.md"), *(root / "runtime").glob("*.md")]):
        text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text("utf-8"))
        for number, line in enumerate(text.splitlines(), start=1):
            named = tuple(NAMED_TEST.findall(line))
            for row in CLAIM.findall(line):
                yield Claim(row, f"{page.relative_to(root)}:{number}", named)


def problems(rows: dict[str, Row], marked: list[tuple[str, str]], claimed: list[Claim]) -> list[str]:
    """Everything that does not fit together; empty when all is well."""
    found = [
        f"{test} carries the row {row}, which tests/rows.toml does not have" for row, test in marked if row not in rows
    ]
    carried = set(marked)
    for claim in claimed:
        row = rows.get(claim.row)
        if row is None:
            found.append(f"{claim.where} claims [{claim.row}], which tests/rows.toml does not have")
        elif not row.proven:
            found.append(f"{claim.where} claims [{claim.row}], which is open: {row.missing or 'no test carries it'}")
        elif claim.named and not any((claim.row, test) in carried for test in claim.named):
            found.append(f"{claim.where} claims [{claim.row}], which none of the tests named there carries")
    return found


def main(root: Path = ROOT) -> int:
    """Prints the rows. 1 when something does not fit together."""
    rows = read_rows(root)
    marked = list(tests_by_row(root))
    for row_id, test in marked:
        if row_id in rows:
            rows[row_id].tests.append(test)
    for row in rows.values():
        print(row)
    proven = sum(row.proven for row in rows.values())
    print(f"{proven} of {len(rows)} rows are proven", file=sys.stderr)
    wrong = problems(rows, marked, list(claims(root)))
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
