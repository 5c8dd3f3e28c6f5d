"""Which classes messages and snapshots may name: those of the author's modules, and what these import by name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from ckpt_runtime.frontend import program
from ckpt_runtime.graph.plan_classes import PlanClasses

FILES = {
    "main.py": """
        from subprocess import Popen
        import ckpt_runtime
        from pyspark.sql import DataFrame
        from more.parts import Part as Renamed
        from library_of_tests import Foreign
        import library_of_tests

        class Source:
            class Inner:
                pass

        class Other(Foreign):
            pass

        class Odd:
            @property
            def __module__(self):
                return "anything"

        def pipeline(spark):
            pass
    """,
    "script.py": """
        import sys
        from beside import Beside

        class Source(Beside):
            pass

        assert __name__ == "__main__"
        assert sys.modules["__main__"].Source is Source
        assert sys.argv == ["script.py", "argument"]
        sys.modules["beside"].found = [Source]
        sys.exit()
    """,
    "beside.py": "class Beside: pass",
    "more/__init__.py": "",
    "more/parts.py": "import beside\nclass Part: pass",
    "never.py": "raise SystemExit('imported')\nclass Never: pass",
}


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], type]:
    """Loads the files from a directory of that name, as a worker loads an archive."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "library_of_tests.py").write_text("class Foreign: pass\nclass Unnamed: pass")
    monkeypatch.syspath_prepend(str(library))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))

    def load(directory: str) -> type:
        for name, text in FILES.items():
            file = tmp_path / directory / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(dedent(text))
        module = program._import_module((tmp_path / directory).resolve(), "main")
        found: type = module.Source
        return found

    monkeypatch.setattr(program, "_loaded_directories", [])
    yield load  # type: ignore[misc]
    program._forget_earlier_archives()


def test_names_are_equal_wherever_the_archive_lies(source: Callable[[str], type]) -> None:
    names = {}
    for directory in ("one", "two"):
        kind = source(directory)
        classes = PlanClasses([kind])
        names[directory] = classes.name_of(kind)
        assert classes.find("main:Source") is kind
        assert classes.find("main:Source.Inner") is vars(kind)["Inner"]
    assert names == {"one": "main:Source", "two": "main:Source"}


def test_modules_of_the_author_and_what_they_import_by_name(source: Callable[[str], type]) -> None:
    classes = PlanClasses([source("one")])
    for name in ("main:Source", "main:Other", "more.parts:Part", "beside:Beside", "library_of_tests:Foreign"):
        found = classes.find(name)
        assert found is not None
        assert classes.name_of(found) == name
    for name in ("subprocess:Popen", "pyspark.sql.dataframe:DataFrame", "library_of_tests:Unnamed", "never:Never"):
        assert classes.find(name) is None
    assert classes.name_of(subprocess.Popen) is None
    assert "never" not in sys.modules


def test_classes_of_a_script_are_those_of_main_after_it_has_ended(
    source: Callable[[str], type], tmp_path: Path
) -> None:
    source("one")
    main = sys.modules["__main__"]
    program.run_script((tmp_path / "one").resolve(), "script", ["argument"])
    assert sys.modules["__main__"] is main
    [kind] = sys.modules["beside"].found
    classes = PlanClasses([kind])
    assert classes.name_of(kind) == "__main__:Source"
    assert classes.find("__main__:Source") is kind
    assert classes.find("beside:Beside") is kind.__base__


def test_classes_of_a_plan_are_found_by_their_modules_names(source: Callable[[str], type]) -> None:
    kind = source("one")
    odd = vars(sys.modules[kind.__module__])["Odd"]
    assert PlanClasses([kind]).name_of(odd) is None
    classes = PlanClasses([source("one")])
    assert classes.name_of(type("Beside", (), {"__module__": "beside"})) is None
    classes = PlanClasses([source("one")], [subprocess.Popen])
    assert classes.find("subprocess:Popen") is subprocess.Popen
