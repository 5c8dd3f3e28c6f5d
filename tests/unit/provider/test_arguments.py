"""Arguments of operators: conversions, and what Airflow's templates make of them."""

from __future__ import annotations

import math
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from airflow.sdk import DAG
from hypothesis import example, given
from hypothesis import strategies as st

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from tests.unit.provider.conftest import JobManager, Task


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (5, 5000),
        (0.25, 250),
        ("5", 5000),
        ("0.5", 500),
        ("5ms", 5),
        ("1.5 s", 1500),
        (" 2 min ", 120_000),
        ("1 H", 3_600_000),
        ("1d", 86_400_000),
        (timedelta(seconds=2), 2000),
    ],
)
def test_durations_are_read_in_every_form(value: Any, expected: int) -> None:
    assert arguments.millis("x", value) == expected


@pytest.mark.parametrize("value", [1.7e308, 10**400, "9" * 400, float("nan"), float("inf"), -1.0])
def test_duration_longer_than_any_timedelta_is_refused(value: Any) -> None:
    for convert in (arguments.millis, arguments.seconds):
        with pytest.raises(CkptArgumentInvalid, match="^x: "):
            convert("x", value)


@pytest.mark.parametrize("value", [None, "None", {"job_id": None}, {"job_id": "None"}])
def test_a_missing_result_of_an_upstream_task_is_refused_as_that(value: Any) -> None:
    with pytest.raises(CkptArgumentInvalid, match="upstream task.* marked success or skipped: clear it"):
        arguments.job(value)


@pytest.mark.parametrize("value", ["", 1.5, [], {}, {"job_id": ""}])
def test_unusable_job_argument_does_not_count_as_a_missing_result(value: Any) -> None:
    with pytest.raises(CkptArgumentInvalid) as refused:
        arguments.job(value)
    assert "upstream" not in str(refused.value)


@given(st.one_of(st.text(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
@example("0\x1f")
def test_any_other_value_gives_an_error_that_names_the_argument(value: Any) -> None:
    for convert in (
        arguments.millis,
        lambda n, v: arguments.integer(n, v, minimum=1),
        lambda n, v: arguments.job(v, n),
    ):
        with suppress(CkptArgumentInvalid):
            convert("field", value)


def test_job_id_of_digits_rendered_as_a_number_is_accepted() -> None:
    assert arguments.job(12345678901234567890123456789012) == "12345678901234567890123456789012"
    assert arguments.job(0) == "0" * 32
    assert arguments.job(2024) == "2024"
    for wrong in (-1, True, 1.5e31, None, "", "None", {"savepoint_path": "/d"}):
        with pytest.raises(CkptArgumentInvalid, match="^job: "):
            arguments.job(wrong)


def test_moments_are_read_in_every_form() -> None:
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    forms = (moment, moment.isoformat(), "2026-01-02T04:04:05+01:00", 1_767_323_045_000, "1767323045000")
    assert {arguments.epoch_millis("x", form) for form in forms} == {1_767_323_045_000}
    for wrong in ("yesterday", moment.replace(tzinfo=None), -1, True, None):
        with pytest.raises(CkptArgumentInvalid):
            arguments.epoch_millis("x", wrong)


def test_text_that_a_template_makes_of_none_counts_as_not_given() -> None:
    assert [arguments.optional_text("x", value) for value in (None, "", " ", "None", " a ")] == [None] * 4 + ["a"]


def test_times_to_wait_are_read_in_every_form() -> None:
    assert arguments.seconds("x", timedelta(minutes=1)) == 60.0
    assert arguments.seconds("x", 0) == 0.0
    assert [arguments.seconds("x", value) for value in (5, "5", "5 s", "5000 ms")] == [5.0] * 4
    for wrong in (-1, "-5", "5 fortnights", math.inf, math.nan, timedelta(seconds=-1), True, None):
        with pytest.raises(CkptArgumentInvalid):
            arguments.seconds("x", wrong)


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
