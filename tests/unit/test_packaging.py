"""The distribution and the tools around it: what is packaged, what is required, and what set-up says when it cannot."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
CHECK_JAVA = REPOSITORY / "scripts" / "check_java.sh"
FIND_PYTHON = REPOSITORY / "scripts" / "find_python.sh"


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def run(script: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    path = environment.pop("PATH", os.environ["PATH"])
    return subprocess.run([str(script)], capture_output=True, text=True, check=False, env={"PATH": path, **environment})


def required(name: str, file: str) -> Any:
    for node in ast.parse((REPOSITORY / file).read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


def locked() -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / "lock.txt").read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {normal(name): version for name, version in pins}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_folder_with_code_is_packaged() -> None:
    runtime = REPOSITORY / "runtime"
    for root in (REPOSITORY / "airflow_provider_ckpt", runtime / "ckpt_runtime", runtime / "pyspark_ckpt"):
        folders = {file.parent for file in root.rglob("*.py")}
        assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
        assert (root / "py.typed").exists()


def test_files_of_the_packages_other_than_code_are_packaged() -> None:
    """Pages and examples among them; a wheel that lacks one serves 404s."""
    packaged = package_data()
    for root in (REPOSITORY / "airflow_provider_ckpt", REPOSITORY / "runtime" / "ckpt_runtime"):
        beside = {path for path in root.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
        assert beside - packaged == set()
    pages = REPOSITORY / "runtime" / "ckpt_runtime" / "web" / "static"
    assert {path.name for path in packaged if path.parent == pages} >= {"index.html", "app.js", "style.css"}


def package_data() -> set[Path]:
    """The files that the patterns of each setup.py name, taken from its one call."""
    found: set[Path] = set()
    for root in (REPOSITORY, REPOSITORY / "runtime"):
        for node in ast.walk(ast.parse((root / "setup.py").read_text())):
            if isinstance(node, ast.keyword) and node.arg == "package_data":
                given: dict[str, list[str]] = ast.literal_eval(node.value)
                for package, patterns in given.items():
                    for pattern in patterns:
                        found |= set((root / package.replace(".", "/")).glob(pattern))
    return found


def test_every_requirement_is_pinned_to_one_version() -> None:
    names = set()
    for file in ("setup.py", "runtime/setup.py"):
        extras = required("EXTRAS_REQUIRE", file).values()
        requirements = [*required("INSTALL_REQUIRES", file), *(entry for extra in extras for entry in extra)]
        names |= {normal(re.split(r"[<>=!~\[;]", requirement)[0]) for requirement in requirements}
    assert names - {"ckpt-runtime"} <= set(locked())
    assert locked()["pyspark"].startswith("4.3.")


def test_the_pins_name_no_registry_and_no_file() -> None:
    text = (REPOSITORY / "requirements" / "lock.txt").read_text()
    assert "://" not in text
    assert "@" not in text
    assert re.findall(r"^-", text, re.MULTILINE) == []


def test_the_runtime_imports_without_airflow() -> None:
    blocked = (
        "import sys; sys.modules['airflow'] = None; import ckpt_runtime.configuration, ckpt_runtime.storage.ha_store"
    )
    subprocess.run(
        [sys.executable, "-c", blocked], check=True, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "runtime")}
    )


@pytest.mark.parametrize(
    "version",
    ['openjdk version "17.0.15" 2025-04-15', 'java version "21" 2023-09-19 LTS', 'openjdk version "25-ea" 2025-09-16'],
)
def test_java_17_and_later_is_accepted(tmp_path: Path, version: str) -> None:
    executable(tmp_path / "bin" / "java", f"echo '{version}' >&2")
    assert run(CHECK_JAVA, JAVA_HOME=str(tmp_path)).returncode == 0


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'openjdk version \"11.0.2\" 2019-01-15' >&2", "is version 11.0.2"),
        ("echo 'java version \"1.8.0_292\"' >&2", "is version 1.8.0_292"),
        ("echo 'The operation could not be completed' >&2; exit 1", "No Java found"),
        ("echo nonsense", "nothing that looks like a version"),
    ],
)
def test_other_javas_are_refused_with_the_way_out(tmp_path: Path, script: str, words: str) -> None:
    executable(tmp_path / "bin" / "java", script)
    refused = run(CHECK_JAVA, JAVA_HOME=str(tmp_path))
    assert refused.returncode == 1
    assert words in refused.stderr
    assert "apt-get install --yes openjdk-17-jre-headless" in refused.stderr
    assert "brew install openjdk@17" in refused.stderr


def test_a_missing_java_is_refused(tmp_path: Path) -> None:
    refused = run(CHECK_JAVA, JAVA_HOME=str(tmp_path))
    assert refused.returncode == 1
    assert "No Java found" in refused.stderr


def test_a_python_is_found_or_the_message_names_the_remedy(tmp_path: Path) -> None:
    found = run(FIND_PYTHON, PYTHON=sys.executable)
    assert found.stdout.strip() == sys.executable
    old = executable(tmp_path / "old" / "python3", "exit 1")
    refused = run(FIND_PYTHON, PYTHON=str(old))
    assert refused.returncode == 1
    assert f"PYTHON={old} is not Python 3.11 or later" in refused.stderr
    executable(tmp_path / "only" / "bash", 'exec /bin/bash "$@"')
    executable(tmp_path / "only" / "cat", 'exec /bin/cat "$@"')
    nothing = run(FIND_PYTHON, PATH=str(tmp_path / "only"))
    assert nothing.returncode == 1
    assert "make setup PYTHON=" in nothing.stderr
