"""Takes savepoints of jobs by schedule, proves each, and deletes those that are too many or too old.

The schedule is the environment variable ``CKPT_SAVEPOINT_SCHEDULE`` where DAGs are parsed (``@daily`` unless set, and
none when it is empty). Jobs are named
by their names, so that the schedule survives redeployments; without any, every job of the session is meant that has a
name of its own. Each job gets a directory of its own. Of the savepoints in it those stay that are among the newest, or
young, and always the newest that is intact; the others are deleted by the session.
"""

from __future__ import annotations

import os
import re
from typing import Any

from airflow.sdk import DAG, Param, TriggerRule, chain, task
from airflow.sdk.exceptions import AirflowSkipException

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.snapshots import VerifySavepointOperator

_SAVEPOINT = "Savepoints"
_RETENTION = "Retention"
_PATIENCE_SECONDS = 180.0


def directory_of(base: str, job: str) -> str:
    """A job's own directory; different jobs have different ones, whatever their names."""
    name = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"={ord(found[0]):02x}", job)
    return f"{base.rstrip('/')}/{name if set(name) - {'.'} else f'job-{name}'}"


@task
def jobs_to_save(params: dict[str, Any] | None = None) -> list[dict[str, str]]:
    """The jobs, each with its directory."""
    given = dict(params or {})
    names = given["jobs"] or _names_of_living_jobs(given["connection"])
    if not names:
        raise AirflowSkipException("no job runs in this session")
    return [{"job": name, "target_directory": directory_of(given["directory"], name)} for name in names]


def _names_of_living_jobs(connection: str) -> list[str]:
    from airflow_provider_ckpt.hooks.ckpt import CkptHook
    from ckpt_runtime.client.models import TERMINAL_STATES

    with CkptHook(connection).get_conn(patience=_PATIENCE_SECONDS) as client:
        names = [line.name for line in client.list_jobs() if line.state not in TERMINAL_STATES]
    unique = [name for name in names if names.count(name) == 1]
    if len(unique) < len(names):
        print(f"left out, since several jobs have the name: {sorted(set(names) - set(unique))}")
    return unique


@task(trigger_rule=TriggerRule.NONE_FAILED)
def directories(jobs: list[dict[str, str]]) -> list[str]:
    """Where savepoints are counted."""
    return [job["target_directory"] for job in jobs]


with DAG(
    dag_id="ckpt_scheduled_savepoints",
    description="Take, verify and keep savepoints by schedule",
    schedule=os.environ.get("CKPT_SAVEPOINT_SCHEDULE", "@daily") or None,
    catchup=False,
    max_active_runs=1,
    params={
        "jobs": Param(
            [],
            type="array",
            items={"type": "string", "minLength": 1},
            title="Jobs",
            description="Names of the jobs, one a line. Empty: every job of the session whose name is its own.",
            section=form.JOB,
        ),
        "connection": form.connection(),
        "directory": form.text(
            form.savepoint_directory(), "Directory", "Each job gets a directory of its own in it.", _SAVEPOINT
        ),
        "format": form.savepoint_format(_SAVEPOINT),
        "keep": Param(
            7,
            type="integer",
            minimum=1,
            title="How many",
            description="So many of each job's newest savepoints are kept.",
            section=_RETENTION,
        ),
        "keep_for": form.duration("7 d", "How long", "Savepoints that are younger are kept as well.", _RETENTION),
        "preview": form.switch(False, "Delete nothing", "Only say in the log what would be deleted.", _RETENTION),
    },
    default_args=form.DEFAULT_ARGS,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_scheduled_savepoints:
    jobs: Any = jobs_to_save()
    savepoints = TakeSavepointOperator.partial(
        task_id="savepoint",
        ckpt_conn_id=form.CONNECTION,
        if_not_found="skip",
        savepoint_format="{{ params.format }}",
        map_index_template="{{ task.job }}",
    ).expand_kwargs(jobs)
    verified = VerifySavepointOperator.partial(
        task_id="verify", trigger_rule=TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS
    ).expand(savepoint_path=savepoints.output)
    cleaned = CleanUpSavepointsOperator.partial(
        task_id="clean_up",
        ckpt_conn_id=form.CONNECTION,
        keep="{{ params.keep }}",
        keep_for="{{ params.keep_for }}",
        preview="{{ params.preview }}",
    ).expand(directory=directories(jobs))
    chain(verified, cleaned)
