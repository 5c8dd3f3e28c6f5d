"""The DAGs of the provider and of the demonstration: imported alone, whole, stored by Airflow, with checked fields."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import AirflowFailException, ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization

import airflow_provider_ckpt.dags as delivered
from airflow_provider_ckpt.arguments import millis
from airflow_provider_ckpt.dags import scheduled_savepoints
from airflow_provider_ckpt.dags._params import DURATION
from airflow_provider_ckpt.dags.scheduled_savepoints import directory_of
from ckpt_runtime.scheduler.job_status import JobStatus
from demo.__main__ import CLOSING_STEP, STEPS
from tests.unit.provider.conftest import JobManager

ROOT = Path(__file__).resolve().parents[3]
DAGS = [getattr(delivered, name) for name in delivered.names()]
JOB = {"job": "orders"}


def test_package_has_the_documented_dags() -> None:
    known = {"ckpt_lifecycle", "ckpt_patch", "ckpt_savepoint_now", "ckpt_scheduled_savepoints"}
    assert known <= set(delivered.names()) == set(dir(delivered))
    with pytest.raises(AttributeError, match="has no DAG 'ckpt_nope', only ckpt_"):
        _ = delivered.ckpt_nope
    installed: dict[str, Any] = {}
    exec("from airflow_provider_ckpt.dags import *", installed)
    assert {name for name, found in installed.items() if isinstance(found, DAG)} == set(delivered.names())


@pytest.mark.row("air.6")
@pytest.mark.parametrize("dag", DAGS, ids=lambda dag: dag.dag_id)
def test_airflow_stores_it_and_its_form_explains_every_field(dag: DAG) -> None:
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert DagSerialization.from_dict(document).dag_id == dag.dag_id
    assert (dag.doc_md, dag.description) != (None, None)
    assert "ckpt" in dag.tags
    for name, param in ((name, dag.params.get_param(name)) for name in dag.params):
        schema = param.schema
        assert str(param.description or schema.get("description_md")).endswith("."), name
        assert {"title", "section", "type"} <= set(schema), name


@pytest.mark.parametrize("name", [dag.dag_id for dag in DAGS])
def test_file_that_installs_a_dag_imports_no_heavy_library_and_takes_little_time(
    name: str, alone: Callable[[str], str]
) -> None:
    said = alone(f"""
import json, sys, time
started = time.process_time()
from airflow_provider_ckpt.dags import {name}
print(json.dumps([{name}.dag_id, time.process_time() - started, sorted(sys.modules)]))
""")
    dag_id, seconds, known = json.loads(said)
    modules = set(known)
    assert dag_id == name
    assert seconds < 2
    assert not {"pyspark", "pyarrow", "numpy", "pandas", "numba", "fastapi"} & modules
    others = {key.rpartition(".")[2] for key in modules if key.startswith("airflow_provider_ckpt.dags.")}
    assert others <= {name.removeprefix("ckpt_"), "_params"}


@pytest.mark.parametrize(
    ("dag_id", "given"),
    [
        ("ckpt_patch", JOB | {"interval": "30 s", "unaligned": True, "max_concurrent": 2}),
        ("ckpt_savepoint_now", JOB | {"copy_to": "/backup"}),
        ("ckpt_scheduled_savepoints", {"jobs": ["orders", "returns"]}),
        ("ckpt_scheduled_savepoints", {}),
    ],
)
def test_valid_form_input_is_accepted(dag_id: str, given: dict[str, Any]) -> None:
    merged = deepcopy(getattr(delivered, dag_id).params)
    merged.update(given)
    merged.validate()


@pytest.mark.parametrize(
    ("dag_id", "given"),
    [
        ("ckpt_patch", {}),
        ("ckpt_patch", JOB | {"interval": "soon"}),
        ("ckpt_patch", JOB | {"timeout": "-5 s"}),
        ("ckpt_patch", JOB | {"max_concurrent": 0}),
        ("ckpt_savepoint_now", JOB | {"format": "zip"}),
        ("ckpt_scheduled_savepoints", {"keep": 0}),
        ("ckpt_scheduled_savepoints", {"jobs": [""]}),
        ("ckpt_patch", JOB | {"interval": "5 fortnights"}),
    ],
)
def test_unusable_form_input_is_refused(dag_id: str, given: dict[str, Any]) -> None:
    merged = deepcopy(getattr(delivered, dag_id).params)
    with pytest.raises(ParamValidationError):
        merged.update(given)
        merged.validate()


@pytest.mark.parametrize("text", ["250 ms", "90", "1.5 h", "7d", " 5 min "])
def test_the_pattern_of_durations_is_that_of_the_operators(text: str) -> None:
    assert re.search(DURATION, text)
    assert millis("x", text) > 0


def test_every_living_job_with_a_name_of_its_own_is_saved_and_no_restore_drill(job_manager: JobManager) -> None:
    gateway = job_manager.gateway
    for number, name in enumerate(["orders", "returns", "twice", "twice", "ended"], start=1):
        gateway.add_job(f"{number:032x}", name)
    gateway.move(f"{5:032x}", JobStatus.FINISHED)
    for number, name in ((6, "orders"), (7, "drilled")):
        drill = gateway.add_job(f"{number:032x}", name)
        drill.request = replace(drill.request, drill=True)
    given = {"jobs": [], "connection": "ckpt_default", "directory": "/data"}
    found = scheduled_savepoints.jobs_to_save.function(given)
    assert sorted(found, key=lambda job: job["job"]) == [
        {"job": name, "target_directory": f"/data/{name}"} for name in ("contract-job", "orders", "returns")
    ]
    assert scheduled_savepoints.jobs_to_save.function(given | {"jobs": ["a", "b", "a"]}) == [
        {"job": name, "target_directory": f"/data/{name}"} for name in ("a", "b")
    ]


def test_a_backfill_saves_no_job() -> None:
    given = {"jobs": ["orders"], "connection": "ckpt_default", "directory": "/data"}
    assert scheduled_savepoints.jobs_to_save.function(given, SimpleNamespace(run_type="backfill")) == []
    assert len(scheduled_savepoints.jobs_to_save.function(given, SimpleNamespace(run_type="scheduled"))) == 1


def test_each_job_has_a_directory_of_its_own() -> None:
    assert directory_of("/data/", "orders of today/eu") == "/data/orders=20of=20today=2feu"
    names = ["a b", "a_b", "a/b", "..", ".", "=", "=3d"]
    found = {directory_of("/data", name) for name in names}
    assert len(found) == len(names)
    assert not any("/.." in path or path.endswith("/.") for path in found)


@pytest.fixture(scope="module")
def module() -> ModuleType:
    return import_module("airflow_provider_ckpt.dags.lifecycle")


def test_the_steps_are_in_order(module: ModuleType) -> None:
    steps = [task.task_id for task in module.ckpt_lifecycle.topological_sort()]
    assert steps == [
        "output_directory",
        "job_options",
        "submit_v1",
        "checkpoint_of_v1",
        "patch_interval_and_timeout",
        "assert_patched",
        "native_savepoint",
        "stop_v1_with_savepoint",
        "resume_v2",
        "checkpoint_of_v2",
        "end_of_v2",
        "verify",
        "cancel_leftovers",
    ]


def test_lifecycle_dag_can_be_stored_and_loaded_by_airflow(module: ModuleType) -> None:
    document = json.loads(json.dumps(DagSerialization.to_dict(module.ckpt_lifecycle)))
    loaded = DagSerialization.from_dict(document)
    assert loaded.dag_id == "ckpt_lifecycle"
    stored = {task["__var"]["task_id"]: task["__var"] for task in document["dag"]["tasks"]}
    assert stored["native_savepoint"]["_operator_extra_links"] == {
        "Job": "_link_CkptJobLink",
        "Checkpoints": "_link_CkptCheckpointsLink",
    }


def test_all_parameters_have_acceptable_defaults(module: ModuleType) -> None:
    module.ckpt_lifecycle.params.validate()
    given = module.ckpt_lifecycle.params.dump() | {"configuration": {"a": 1}}
    options: dict[str, Any] = module.job_options.function(params=given)
    assert options["execution.checkpointing.interval"] == "2 s"
    assert options["a"] == 1


def test_each_run_has_an_output_directory_of_its_own(module: ModuleType, tmp_path: Path) -> None:
    runs = ("manual__2026-11-22T10:00:00+00:00", "manual__2026-11-22T10:00:01+00:00")
    first, second = (module.directory_of_run(str(tmp_path), run) for run in runs)
    assert first != second
    assert {first.parent, second.parent} == {tmp_path}
    assert module.directory_of_run(str(tmp_path), "../../etc") == tmp_path / "_etc"


def test_a_directory_that_is_not_empty_is_refused_before_anything_starts(module: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert module.directory_of_run(str(tmp_path), "run") == tmp_path / "run"
    (tmp_path / "run" / "part-0.parquet").touch()
    with pytest.raises(AirflowFailException, match=f"^output: '{tmp_path}/run' is not empty"):
        module.directory_of_run(str(tmp_path), "run")
    (tmp_path / "file").touch()
    with pytest.raises(AirflowFailException, match="^output: "):
        module.directory_of_run(str(tmp_path), "file")


def test_every_task_writes_and_reads_the_runs_own_directory(module: ModuleType) -> None:
    for task_id in ("submit_v1", "resume_v2"):
        arguments = module.ckpt_lifecycle.get_task(task_id).args
        assert arguments[arguments.index("--output") + 1] == "{{ ti.xcom_pull(task_ids='output_directory') }}"
        assert "output_directory" in module.ckpt_lifecycle.get_task(task_id).get_flat_relative_ids(upstream=True)
    assert "output_directory" in module.ckpt_lifecycle.get_task("verify").upstream_task_ids


def test_steps_of_the_dag_are_those_that_the_demonstration_reports() -> None:
    dag = import_module("demo.dags.orders_demo").orders_demo
    steps = [task.task_id for task in dag.topological_sort()]
    assert [step for step in steps if step != "cancel_leftovers"] == list(STEPS)
    assert CLOSING_STEP in STEPS
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert DagSerialization.from_dict(document).dag_id == "orders_demo"
