"""Restores a savepoint for practice: into a job that touches nothing outside and is thrown away.

Start it from the trigger form: with *latest of* it takes the latest good savepoint of a job, by its name, so that it
survives every redeployment. Each run notes in the catalogue of savepoints whether the savepoint could be restored; one
that could not is not found as the latest good one any more, and the run fails.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

from airflow.sdk import DAG, Param

from airflow_provider_ckpt.operators.drill import RestoreDrillOperator

CONNECTION = os.environ.get("CKPT_CONN_ID", "ckpt_default")
OPTIONS: Any = "{{ params.configuration }}"
DURATION = r"^\s*\d{1,15}(\.\d{1,9})?\s*(ms|s|sec|min|m|h|d)?\s*$"
WHAT, JOB, GOAL = "What is restored", "The job", "When it has passed"


def text(default: str, title: str, description: str, section: str, **schema: Any) -> Param:
    """A text in the trigger form; it may be left empty unless ``schema`` says otherwise."""
    return Param(default, type=["string", "null"], title=title, description_md=description, section=section, **schema)


PARAMS = {
    "latest_of": text(
        "", "Latest of", "Name or id of the job whose latest good savepoint is meant. Not with a savepoint.", WHAT
    ),
    "savepoint": text("", "Savepoint", "Path or URL of one savepoint. Not with *latest of*.", WHAT),
    "directory": text(
        "", "Directory", "Where the latest one is looked for; empty: the directory configured for the job.", WHAT
    ),
    "pipeline": Param(
        "/opt/pipelines",
        type="string",
        minLength=1,
        title="Pipeline",
        description_md="A `.py`, a `.zip` or a folder on the worker: the program that is to restore it.",
        section=JOB,
    ),
    "entry": text("", "Entry point", "`module:function`, if there are several.", JOB, pattern=r"^(\s*|[\w.]+:[\w.]+)$"),
    "args": Param(
        [], type="array", items={"type": "string"}, title="Arguments", description_md="One per line.", section=JOB
    ),
    "parallelism": Param(
        None,
        type=["integer", "null"],
        minimum=1,
        title="Parallelism",
        description_md="Empty: as the pipeline and the session say. The drill needs that many slots.",
        section=JOB,
    ),
    "configuration": Param(
        {}, type="object", title="Options of the job", description_md="Keys and values, as at submission.", section=JOB
    ),
    "checkpoints": Param(
        2,
        type="integer",
        minimum=1,
        maximum=1000,
        title="Checkpoints",
        description_md="So many have to complete with the restored state.",
        section=GOAL,
    ),
    "checkpoint_interval": Param(
        "5 s",
        type="string",
        pattern=DURATION,
        title="Checkpoint interval",
        description_md="Of the drill, in the place of the job's.",
        section=GOAL,
    ),
    "timeout": Param(
        "10 min",
        type="string",
        pattern=DURATION,
        title="Timeout",
        description_md="By then it has passed, or has failed.",
        section=GOAL,
    ),
    "mark": Param(
        True,
        type="boolean",
        title="Note the result",
        description_md="In the catalogue of savepoints, where it decides which one is good.",
        section=GOAL,
    ),
}

with DAG(
    dag_id="ckpt_restore_drill",
    description="Restore a savepoint into a job that touches nothing outside, and note whether that worked",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args={"ckpt_conn_id": CONNECTION, "retries": 2, "retry_delay": timedelta(seconds=30)},
    render_template_as_native_obj=True,
    tags=["ckpt"],
    doc_md=__doc__,
) as ckpt_restore_drill:
    RestoreDrillOperator(
        task_id="drill",
        pipeline="{{ params.pipeline }}",
        savepoint_path="{{ params.savepoint }}",
        latest_of="{{ params.latest_of }}",
        directory="{{ params.directory }}",
        entry="{{ params.entry }}",
        args="{{ params.args }}",
        parallelism="{{ params.parallelism }}",
        configuration=OPTIONS,
        checkpoints="{{ params.checkpoints }}",
        checkpoint_interval="{{ params.checkpoint_interval }}",
        mark="{{ params.mark }}",
        wait_timeout="{{ params.timeout }}",
    )
