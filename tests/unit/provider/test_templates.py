"""Arguments as Airflow's templates render them, to texts and, where a DAG asks for it, to native values."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG

from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from tests.unit.provider.conftest import JobManager, Task

DIGITS = "12345678901234567890123456789012"


def rendered(operator: Any, native: bool, values: dict[str, Any]) -> Any:
    with DAG(dag_id="d", schedule=None, render_template_as_native_obj=native) as dag:
        pass
    operator.dag = dag
    operator.render_template_fields(values, jinja_env=dag.get_template_env())
    return operator


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("job_id", [DIGITS, "0" * 32])
def test_id_of_digits_only_stays_a_text(native: bool, job_id: str, job_manager: JobManager, task: Task) -> None:
    job_manager.gateway.add_job(job_id)
    operator = PatchCheckpointConfigOperator(task_id="t", job="{{ job }}", interval="{{ interval }}")
    rendered(operator, native, {"job": job_id, "interval": 7})
    assert operator.execute(task.context())["interval_ms"] == 7000
    assert job_manager.count(f"PATCH /jobs/{job_id}/checkpoints/configuration") == 1


@pytest.mark.parametrize("native", [False, True])
def test_every_duration_may_be_a_template(native: bool) -> None:
    operator = TakeSavepointOperator(
        task_id="t", job=DIGITS, defer_after="{{ a }}", wait_timeout="{{ b }}", poll_interval="{{ c }}"
    )
    rendered(operator, native, {"a": "250 ms", "b": 90, "c": "0.5"})
    assert operator.pause() == 0.5
    fields = {name: str(getattr(operator, name)) for name in ("defer_after", "wait_timeout", "poll_interval")}
    assert fields == {"defer_after": "250 ms", "wait_timeout": "90", "poll_interval": "0.5"}
