"""The distributions where only a part of them is installed: no packages of sessions, or no Airflow.

Each environment is made of links to the installed distributions that the requirements without extras lead to, and to
no others: what it lacks, it really lacks.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ckpt_runtime.jobmaster.leadership import LeaseSignature
from ckpt_runtime.spark.installation import MODULES
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.version import VERSION
from tests.unit.provider.conftest import JOB, JobManager

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What wheels of both distributions contain, each in a folder of its name, with its metadata."""
    target = tmp_path_factory.mktemp("built")
    for name, source in (("airflow-provider-ckpt", REPOSITORY), ("ckpt-runtime", REPOSITORY / "runtime")):
        base = target / name
        base.mkdir()
        command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(base)]
        command += ["build", "--build-base", str(target / f"{name}.build"), "--build-lib", str(base)]
        subprocess.run(command, cwd=source, check=True, capture_output=True)
    return target


def requirements_of(built: Path, name: str, extra: str = "") -> list[str]:
    """Those without an extra, or those of one extra alone."""
    (found,) = importlib.metadata.distributions(path=[str(built / name)])
    markers = [(Requirement(text), text) for text in found.requires or []]
    return [
        text.partition(";")[0]
        for requirement, text in markers
        if (requirement.marker.evaluate({"extra": extra}) if requirement.marker else not extra)
    ]


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
def environment(tmp_path_factory: pytest.TempPathFactory, built: Path) -> Path:
    requirements = requirements_of(built, "airflow-provider-ckpt") + requirements_of(built, "ckpt-runtime")
    return linked(tmp_path_factory.mktemp("packages"), requirements)


def linked(packages: Path, requirements: Iterable[str]) -> Path:
    for distribution in distributions(requirements).values():
        names = {file.parts[0] for file in distribution.files or [] if file.parts[0] not in ("..", "__pycache__")}
        for name in names:
            target = packages / name
            if not target.exists():
                target.symlink_to(Path(str(distribution.locate_file(name))))
    return packages


def run(environment: Path, tmp_path: Path, code: str, *code_of: Path) -> subprocess.CompletedProcess[str]:
    path = [*map(str, code_of or (REPOSITORY, REPOSITORY / "runtime")), str(environment)]
    settings = {
        "AIRFLOW_HOME": str(tmp_path),
        "HOME": str(tmp_path),
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(path),
        "AIRFLOW__CORE__UNIT_TEST_MODE": "True",
    }
    return subprocess.run(
        [sys.executable, "-S", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,  # it would be the first folder that modules are looked for in
        env=settings,
        timeout=100,
    )


def modules_of(folder: str) -> list[str]:
    files = sorted((REPOSITORY / folder).rglob("*.py"))
    return [re.sub(r"(\.__init__)?\.py$", "", ".".join(file.relative_to(REPOSITORY).parts)) for file in files]


def test_the_extra_is_what_a_session_checks_for(built: Path) -> None:
    names = {Requirement(text).name.replace("-", "_") for text in requirements_of(built, "ckpt-runtime", "session")}
    of_connect = {"grpc", "grpc_status", "pandas"}
    assert names | of_connect == set(MODULES), "PySpark's extra `connect` brings those of gRPC and pandas"


def test_the_provider_requires_the_very_engine_of_its_release(built: Path) -> None:
    assert f"ckpt-runtime=={VERSION}" in requirements_of(built, "airflow-provider-ckpt")
    for extra, of_engine in (("runtime", "session"), ("rocksdb", "rocksdb"), ("s3", "s3")):
        assert requirements_of(built, "airflow-provider-ckpt", extra) == [f"ckpt-runtime[{of_engine}]=={VERSION}"]
        assert requirements_of(built, "ckpt-runtime", of_engine)


def test_each_package_is_in_one_distribution_only(built: Path) -> None:
    names = ("airflow-provider-ckpt", "ckpt-runtime")
    folders = {name: {path.name for path in (built / name).iterdir()} for name in names}
    assert folders == {
        "airflow-provider-ckpt": {"airflow_provider_ckpt", "airflow_provider_ckpt.egg-info"},
        "ckpt-runtime": {"ckpt_runtime", "pyspark_ckpt", "ckpt_runtime.egg-info"},
    }
    assert (built / "ckpt-runtime" / "ckpt_runtime" / "web" / "static" / "index.html").exists()


def test_the_engine_without_airflow_has_its_command_line(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, job_manager: JobManager
) -> None:
    packages = linked(tmp_path_factory.mktemp("client"), requirements_of(built, "ckpt-runtime"))
    code = f"""
import importlib.util, sys
for name in ("airflow", "airflow_provider_ckpt", "grpc", "numpy", "pandas", "pyarrow", "pyspark"):
    assert importlib.util.find_spec(name) is None, name
from ckpt_runtime.cli.main import entry_point
sys.argv = ["ckpt", "--url", "http://127.0.0.1:{job_manager.port}", "list"]
entry_point()
"""
    ended = run(packages, tmp_path, code, built / "ckpt-runtime")
    assert JOB in ended.stdout, ended.stderr


@pytest.mark.long
def test_the_engine_without_airflow_imports_all_that_a_session_runs(
    built: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    needed = [*requirements_of(built, "ckpt-runtime"), *requirements_of(built, "ckpt-runtime", "session")]
    packages = linked(tmp_path_factory.mktemp("session"), needed)
    names = [name.removeprefix("runtime.") for name in modules_of("runtime/ckpt_runtime")]
    # Rooms with an extra of their own.
    names = [name for name in names if not re.search(r"__main__$|\.(rocksdb|connect)\.", name)]
    code = f"""
import importlib, importlib.util
assert importlib.util.find_spec("airflow") is None
from ckpt_runtime.spark.installation import check_runtime
check_runtime()
for name in {names}:
    importlib.import_module(name)
print("imported")
"""
    ended = run(packages, tmp_path, code, built / "ckpt-runtime")
    assert ended.stdout.splitlines()[-1:] == ["imported"], ended.stderr


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


@pytest.mark.long
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
    store = HaStore(str(tmp_path / "ha")).leader.signed_by(LeaseSignature("token", "default"))
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
    assert "RuntimeNotInstalledError: a session needs numba, prometheus_client" in ended.stderr
    assert "pip install 'ckpt-runtime[session]'" in ended.stderr


def test_tools_for_snapshots_name_what_to_install(environment: Path, tmp_path: Path) -> None:
    code = "import sys; sys.argv = ['ckpt', 'snapshot', 'verify', '/x']; from ckpt_runtime.cli.main import entry_point"
    ended = run(environment, tmp_path, f"{code}; entry_point()")
    assert ended.returncode == 1
    assert ended.stderr.startswith("ckpt: reading snapshots needs ")
    assert "pip install 'ckpt-runtime[session]'" in ended.stderr
