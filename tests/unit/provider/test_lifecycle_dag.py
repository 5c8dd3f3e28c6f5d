"""The DAG ``ckpt_lifecycle``: light to import, whole, and storable by Airflow."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization


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
