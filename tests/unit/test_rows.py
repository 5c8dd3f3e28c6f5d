"""``make rows``: this project's rows fit together, and what does not fit is found."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
PROVEN = '[A]\n"1.1" = { title = "one" }\n'
TEST = 'import pytest\n\n\n@pytest.mark.row("1.1")\ndef test_one() -> None:\n    pass\n'


@pytest.fixture(scope="module")
def rows() -> ModuleType:
    specification = importlib.util.spec_from_file_location("rows_script", ROOT / "scripts" / "rows.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["rows_script"] = module
    specification.loader.exec_module(module)
    return module


def project(root: Path, table: str = PROVEN, test: str = TEST, page: str = "") -> Path:
    (root / "tests" / "unit").mkdir(parents=True)
    (root / "docs").mkdir()
    (root / "tests" / "rows.toml").write_text(table)
    (root / "tests" / "unit" / "test_a.py").write_text(test)
    (root / "docs" / "page.md").write_text(page)
    return root


def test_the_rows_of_this_project_fit_together() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "rows.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["571.1", "571.2", "571.3"]
    assert all(line.split()[1] in ("proven", "open") for line in lines)
    given = tomllib.loads((ROOT / "tests" / "rows.toml").read_text())
    assert len(lines) == sum(map(len, given.values()))


def test_proven_rows_have_a_test_outside_of_the_long_suite(rows: ModuleType) -> None:
    short = set()
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text("utf-8"))
        for _, test, inherited in rows._tests(module, path.name, rows._rows_of_module(module, path.name)):
            if not any(ast.unparse(decorator) == "pytest.mark.long" for decorator in test.decorator_list):
                short.update([*inherited, *rows._marks(test, path.name)])
    assert {row.id for row in rows.read_rows(ROOT).values() if not row.missing} <= short


def test_a_proven_row_names_its_tests(rows: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rows.main(project(tmp_path, page="It works [1.1].\n")) == 0
    assert capsys.readouterr().out == "1.1    proven   1  unit/test_a.py::test_one\n"


def test_marks_on_modules_classes_and_parameters_count(rows: ModuleType, tmp_path: Path) -> None:
    source = """
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.row("1.1")]


@pytest.mark.row("1.2")
class TestIt:
    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.row("1.3")), 2])
    def test_one(self, x: int) -> None:
        pass


def test_two() -> None:
    pass
"""
    found = list(rows.tests_by_row(project(tmp_path, test=source)))
    assert found == [
        ("1.1", "tests/unit/test_a.py::TestIt::test_one"),
        ("1.2", "tests/unit/test_a.py::TestIt::test_one"),
        ("1.3", "tests/unit/test_a.py::TestIt::test_one"),
        ("1.1", "tests/unit/test_a.py::test_two"),
    ]


@pytest.mark.parametrize(
    ("table", "test", "page", "complaint"),
    [
        (PROVEN, "", "A promise [1.1].", "page.md:1 claims [1.1], which is open: no test carries it"),
        (PROVEN.replace(" }", ', missing = "half" }'), TEST, "A promise [1.1].", "which is open: half"),
        (PROVEN, TEST, "\nA promise [76.9].", "page.md:2 claims [76.9], which tests/rows.toml does not have"),
        (PROVEN, TEST.replace("1.1", "1.2"), "", "test_one carries the row 1.2"),
        (PROVEN, TEST, "| A promise [1.1] | `tests/a.py::test_b` |", "which none of the tests named there carries"),
    ],
)
def test_rows_that_do_not_match_their_tests_are_reported(
    rows: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    table: str,
    test: str,
    page: str,
    complaint: str,
) -> None:
    assert rows.main(project(tmp_path, table, test, page)) == 1
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize("page", ["a [1.1](link.md)", "```\n[76.9]\n```\n", "[1.1]: reference"])
def test_links_and_examples_are_no_claims(rows: ModuleType, tmp_path: Path, page: str) -> None:
    assert list(rows.claims(project(tmp_path, page=page))) == []


@pytest.mark.parametrize(
    ("table", "test"),
    [
        ('[A]\n"x" = { title = "one" }\n', ""),
        ('[A]\n"1.1" = { title = "" }\n', ""),
        ('[A]\n"1.1" = { title = "one", proven = true }\n', ""),
        ('[A]\n"1.1" = { title = "one" }\n[B]\n"1.1" = { title = "two" }\n', ""),
        (PROVEN, TEST.replace('"1.1"', "ROW")),
        (PROVEN, TEST.replace('"1.1"', '"1.1", 2')),
    ],
)
def test_table_of_rows_that_cannot_be_read_is_an_error(rows: ModuleType, tmp_path: Path, table: str, test: str) -> None:
    with pytest.raises(ValueError, match=r"rows\.toml|test_a\.py:4"):
        rows.main(project(tmp_path, table, test))
