"""Takes savepoints of jobs on a schedule, verifies each, and deletes those that are too many or too old.

The schedule is the environment variable ``CKPT_SAVEPOINT_SCHEDULE`` where DAGs are parsed (``@daily`` unless set, and
none when it is empty). Jobs are given by name, so that the schedule survives redeployments; without any, every job
of the session with a unique name is saved, restore drills excepted. Each job gets a directory of its
own. The newest and the young savepoints in it are kept, and always the newest that is intact; the
session deletes the others.

A job does not affect the others. A job that has already ended is skipped. A job whose savepoint
cannot be taken or verified keeps its old savepoints. The task ``results`` runs last: its XCom ``jobs`` has the
final states of each job's steps, and the run fails there if one of them has failed.

A backfill takes no savepoint, because a savepoint has the state of now, and not that of an interval that has passed.
"""

from __future__ import annotations

import os
import re
from typing import Any

from airflow.sdk import DAG, Param, TriggerRule, chain, task, task_group
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.snapshots import VerifySavepointOperator

_SAVEPOINT = "Savepoints"
_RETENTION = "Retention"
_RETRY_TIMEOUT_SECONDS = 180.0
_STEPS = ("savepoint", "verify", "clean_up")


def directory_of(base: str, job: str) -> str:
    """A job's own directory; different jobs have different ones for any names."""
    name = re.sub(r"[^A-Za-z0-9._-]", lambda found: f"={ord(found[0]):02x}", job)
    return f"{base.rstrip('/')}/{name if set(name) - {'.'} else f'job-{name}'}"


@task
def jobs_to_save(params: dict[str, Any] | None = None, dag_run: Any = None) -> list[dict[str, str]]:
    """The jobs, each with its directory; none in a backfill."""
    if dag_run is not None and dag_run.run_type == "backfill":
        print(
            "this run is part of a backfill: a savepoint has the current state, not that of the run's interval, so "
            "no savepoint is taken"
        )
        return []
    given = dict(params or {})
    names = list(dict.fromkeys(given["jobs"])) or _names_of_living_jobs(given["connection"])
    if not names:
        print("no job runs in this session")
    return [{"job": name, "target_directory": directory_of(given["directory"], name)} for name in names]


def _names_of_living_jobs(connection: str) -> list[str]:
    from airflow_provider_ckpt.hooks.ckpt import CkptHook
    from ckpt_runtime.contract.jobs import TERMINAL_STATES

    with CkptHook(connection).get_conn(retry_timeout=_RETRY_TIMEOUT_SECONDS) as client:
        lines = client.list_jobs()
    names = [line.name for line in lines if line.state not in TERMINAL_STATES and not line.drill]
    unique = [name for name in names if names.count(name) == 1]
    if len(unique) < len(names):
        print(f"ignored, because several jobs have the same name: {sorted(set(names) - set(unique))}")
    return unique


@task(trigger_rule=TriggerRule.ALL_DONE, retries=0)
def results(jobs: list[dict[str, str]] | None, ti: Any = None) -> None:
    """Store the final states of each job's steps as the XCom ``jobs``.

    :raises AirflowFailException: naming the jobs with a failed step, or when the jobs could not be listed.
    """
    if jobs is None:
        raise AirflowFailException("the jobs of the session could not be listed, so no savepoint was taken")
    runs = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id], task_ids=list(_STEPS))
    found = {
        job["job"]: {step: runs[ti.run_id].get(f"{step}_{index}") for step in _STEPS} for index, job in enumerate(jobs)
    }
    ti.xcom_push(key="jobs", value=found)
    failed = []
    for job, states in found.items():
        states_text = ", ".join(f"{step}: {state}" for step, state in states.items())
        print(f"{job!r}: {states_text}")
        if "failed" in states.values():
            failed.append(f"{job!r} ({states_text})")
    if failed:
        raise AirflowFailException(f"steps of {len(failed)} of {len(found)} jobs failed: {'; '.join(failed)}")


@task_group(prefix_group_id=False)
def save(job: str, target_directory: str) -> None:
    """The steps of one job; each waits for those of its own job only."""
    savepoint = TakeSavepointOperator(
        task_id="savepoint",
        ckpt_conn_id=form.CONNECTION,
        job=job,
        target_directory=target_directory,
        if_not_found="skip",
        savepoint_format="{{ params.format }}",
        map_index_template="{{ task.job }}",
    )
    verified = VerifySavepointOperator(
        task_id="verify", savepoint_path=savepoint.savepoint_path, map_index_template="{{ task.savepoint_path }}"
    )
    cleaned = CleanUpSavepointsOperator(
        task_id="clean_up",
        ckpt_conn_id=form.CONNECTION,
        directory=target_directory,
        keep="{{ params.keep }}",
        keep_for="{{ params.keep_for }}",
        preview="{{ params.preview }}",
        map_index_template="{{ task.directory }}",
    )
    chain(savepoint, verified, cleaned)


with DAG(
    dag_id="ckpt_scheduled_savepoints",
    description="Take, verify and keep savepoints on a schedule",
    schedule=os.environ.get("CKPT_SAVEPOINT_SCHEDULE", "@daily") or None,
    catchup=False,
    max_active_runs=1,
    params={
        "jobs": Param(
            [],
            type="array",
            items={"type": "string", "minLength": 1},
            title="Jobs",
            description="Names of the jobs, one per line. If empty, every job of the session with a unique name.",
            section=form.JOB,
        ),
        "connection": form.connection(),
        "directory": form.text(
            form.savepoint_directory(), "Directory", "Each job gets its own directory in it.", _SAVEPOINT
        ),
        "format": form.savepoint_format(_SAVEPOINT),
        "keep": form.number(
            7, "Savepoints to keep", "Number of each job's newest savepoints that are kept.", _RETENTION
        ),
        "keep_for": form.duration("7 d", "Minimum age to delete", "Younger savepoints are kept as well.", _RETENTION),
        "preview": form.switch(False, "Preview", "Only log what would be deleted.", _RETENTION),
    },
    default_args=form.DEFAULT_ARGS,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_scheduled_savepoints:
    jobs: Any = jobs_to_save()
    chain(save.expand_kwargs(jobs), results(jobs))
