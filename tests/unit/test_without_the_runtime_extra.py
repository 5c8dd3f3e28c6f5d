"""The provider, the client and the command line where the extra ``runtime`` is not installed.

The environment is made of links to the installed distributions that the requirements without extras lead to, and to
no others: what it lacks, it really lacks.
"""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ckpt_runtime.jobmaster.leadership import LeaseSeal
from ckpt_runtime.spark.runtime_guard import MODULES
from ckpt_runtime.storage.ha_store import HaStore
from tests.unit.provider.conftest import JOB, JobManager

REPOSITORY = Path(__file__).parents[2]


def setup_value(name: str) -> object:
    for node in ast.parse((REPOSITORY / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == name:
            return ast.literal_eval(node.value)
    raise AssertionError(name)


def distributions(requirements: Iterable[str]) -> dict[str, importlib.metadata.Distribution]:
    """What these lead to, as far as it is installed: optional parts for other machines are not."""
    found: dict[str, importlib.metadata.Distribution] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        requirement = waiting.pop()
        key = (requirement.name.lower(), frozenset(requirement.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            distribution = importlib.metadata.distribution(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            continue
        found[requirement.name.lower()] = distribution
        for text in distribution.requires or []:
            needed = Requirement(text)
            extras = ("", *requirement.extras)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in extras):
                waiting.append(needed)
    return found


@pytest.fixture(scope="module")
def job_manager() -> Iterator[JobManager]:
    manager = JobManager()
    yield manager
    manager.close()


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    packages = tmp_path_factory.mktemp("packages")
    requirements = setup_value("INSTALL_REQUIRES")
    assert isinstance(requirements, list)
    for distribution in distributions(requirements).values():
        names = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for name in names:
            target = packages / name
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(name))))
    return packages


def run(environment: Path, tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    path = [str(REPOSITORY), str(REPOSITORY / "runtime"), str(environment)]
    settings = {
        "AIRFLOW_HOME": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(path),
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
    }
    return subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, check=False, env=settings, timeout=100
    )


def modules_of(folder: str) -> list[str]:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    return [re.sub(r"(\.__init__)?\.py$", "", ".".join(file.relative_to(REPOSITORY).parts)) for file in files]


def test_the_extra_is_what_a_session_checks_for() -> None:
    extras = setup_value("EXTRAS_REQUIRE")
    assert isinstance(extras, dict)
    names = {Requirement(text).name.replace("-", "_") for text in extras["runtime"]}
    assert names == set(MODULES)


def test_provider_and_dags_import(environment: Path, tmp_path: Path) -> None:
    names = [name.replace(".__init__", "") for name in modules_of("airflow_provider_ckpt")]
    dag = REPOSITORY / "dags" / "ckpt_lifecycle.py"
    code = f"""
import importlib, importlib.util, runpy
assert importlib.util.find_spec("numba") is None, "the environment has what it should lack"
for name in {names}:
    importlib.import_module(name)
runpy.run_path({str(dag)!r})
print("imported")
"""
    ended = run(environment, tmp_path, code)
    assert ended.stdout.splitlines()[-1:] == ["imported"], ended.stderr


def test_operators_and_the_command_line_work(environment: Path, tmp_path: Path, job_manager: JobManager) -> None:
    code = f"""
import os, sys
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from ckpt_runtime.cli.main import entry_point

class TaskInstance:
    def xcom_push(self, key, value): pass

os.environ["AIRFLOW_CONN_CKPT_DEFAULT"] = {job_manager.connection!r}
operator = PatchCheckpointConfigOperator(task_id="patch", job={JOB!r}, interval="7 s")
print(operator.execute({{"ti": TaskInstance()}})["interval_ms"])
sys.argv = ["ckpt", "--url", "http://127.0.0.1:{job_manager.port}", "list"]
entry_point()
"""
    ended = run(environment, tmp_path, code)
    assert "7000" in ended.stdout.split(), ended.stderr
    assert JOB in ended.stdout, ended.stderr


def test_the_leader_is_found_in_its_directory(environment: Path, tmp_path: Path, job_manager: JobManager) -> None:
    store = HaStore(str(tmp_path / "ha")).leader.sealed_by(LeaseSeal("token", "default"))
    store.claim(f"http://127.0.0.1:{job_manager.port}", "app", "1", after=0)
    code = f"""
import json, os, sys
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from ckpt_runtime.cli.main import entry_point

os.environ["AIRFLOW_CONN_CKPT_DEFAULT"] = json.dumps(
    {{"conn_type": "ckpt", "password": "token", "extra": {{"ha_dir": {str(tmp_path / "ha")!r}}}}}
)
print(CkptHook().test_connection())
sys.argv = ["ckpt", "--ha-dir", {str(tmp_path / "ha")!r}, "--token", "token", "list"]
entry_point()
"""
    ended = run(environment, tmp_path, code)
    assert f"leader http://127.0.0.1:{job_manager.port}" in ended.stdout, ended.stderr
    assert JOB in ended.stdout, ended.stderr


def test_a_session_names_what_to_install(environment: Path, tmp_path: Path) -> None:
    code = f"import runpy; runpy.run_path({str(REPOSITORY / 'runtime' / 'main.py')!r}, run_name='__main__')"
    ended = run(environment, tmp_path, code)
    assert "RuntimeNotInstalledError: a session needs numba, orjson, prometheus_client, xxhash" in ended.stderr
    assert "pip install 'airflow-provider-ckpt[runtime]'" in ended.stderr


def test_tools_for_snapshots_name_what_to_install(environment: Path, tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['ckpt', 'snapshot', 'verify', '/x']; from ckpt_runtime.cli.main import entry_point"
    ended = run(environment, tmp_path, f"{code}; entry_point()")
    assert ended.returncode == 1
    assert ended.stderr.startswith("ckpt: reading snapshots needs ")
    assert "pip install 'airflow-provider-ckpt[runtime]'" in ended.stderr
