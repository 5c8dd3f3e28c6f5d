"""What a task's log shows of options."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.execution_time import task_runner

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.drill import RestoreDrillOperator
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.operators.session import StartSessionOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from tests.unit.provider.conftest import Task


def test_a_command_is_shown_without_the_values_of_its_options() -> None:
    command = [
        "spark-submit",
        "--conf",
        "spark.a=hush",
        "-D",
        "my.db.password=hush=hush\nhush",
        "main.py",
        "--port",
        "1",
    ]
    assert arguments.shown_command(command) == (
        "spark-submit --conf spark.a=****** -D my.db.password=****** main.py --port 1"
    )


@pytest.mark.parametrize(
    ("rendered", "secrets"),
    [
        ({"my.db.password": "hush", "parallelism.default": "2", "x.token": "", "x.key": 5}, ["hush"]),
        ({"jdbc": "pg://me:hush@h/db?of=pg://you:hushed@i"}, ["hush", "hushed"]),
        ("--my.token=hush=hush", ["hush=hush"]),
        ("--jdbc=pg://me:hush@h/db", ["hush"]),
        ("s3://bucket/a@b", []),
        (None, []),
    ],
)
def test_secret_values_are_masked(monkeypatch: pytest.MonkeyPatch, rendered: object, secrets: list[str]) -> None:
    reported: list[object] = []
    monkeypatch.setattr(arguments, "mask_secret", reported.append)
    arguments.hide(rendered)
    assert reported == secrets


PROGRAM = {"pipeline": "/opt/totals.py", "args": ["--s3.sas={{ params.of }}-in-arguments"]}


@pytest.mark.parametrize(
    ("kind", "fixed", "field"),
    [
        (SubmitJobOperator, PROGRAM, "configuration"),
        (RestoreDrillOperator, PROGRAM | {"savepoint_path": "/s"}, "configuration"),
        (UpgradeJobOperator, PROGRAM | {"job": "totals"}, "configuration"),
        (UpdateJobConfigOperator, {"job": "totals"}, "configuration"),
        (StartSessionOperator, {}, "configuration"),
        (StartSessionOperator, {}, "spark_conf"),
        (StartSessionOperator, {}, "env"),
    ],
)
@pytest.mark.parametrize("mapped", [False, True])
def test_airflow_shows_no_secret_in_rendered_templates(
    kind: Any, fixed: dict[str, Any], field: str, mapped: bool
) -> None:
    """They are stored before the task is executed."""
    secret = f"hush-{kind.__name__}-{field}-{mapped}"
    given = {"fs.azure.account.key.data": "{{ params.of }}", "jdbc": "pg://me:{{ params.of }}-too@h", "kept": "kept"}
    with DAG(dag_id="d", schedule=None, params={"of": secret}) as dag:
        if mapped:
            kind.partial(task_id="t", **fixed).expand(**{field: [given]})
        else:
            kind(task_id="t", **fixed, **{field: given})
    context: Any = {**Task(map_index=0 if mapped else -1).context(), "dag": dag, "params": {"of": secret}}
    context["dag_run"] = SimpleNamespace(conf={})
    context["ti"].get_relevant_upstream_map_indexes = lambda **_: None
    dag.get_task("t").render_template_fields(context)
    task = context.get("task") or dag.get_task("t")
    assert getattr(task, field)["fs.azure.account.key.data"] == secret
    shown = task_runner._serialize_rendered_fields(task)
    assert secret not in str(shown)
    assert "kept" in str(shown[field])


@pytest.mark.parametrize("given", [{"my.password": ["hush"]}, "my.password=hush", [("my.password", "hush")]])
def test_options_of_a_wrong_type_are_refused_without_their_value(given: object) -> None:
    with pytest.raises(CkptArgumentInvalid) as caught:
        arguments.options("configuration", given)
    assert "hush" not in str(caught.value)
