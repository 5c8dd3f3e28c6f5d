"""Proves that a savepoint can be restored: into a job without any outside effect, which is then removed.

Start it from the trigger form. With *latest of* it takes the latest good savepoint of a job, by its name, which stays
the same in every redeployment. Each run notes in the catalogue of savepoints whether the savepoint could be restored;
a savepoint that could not is no longer found as the latest good one, and the run fails.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.drill import RestoreDrillOperator

OPTIONS: Any = "{{ params.configuration }}"
WHAT, JOB, GOAL = "Savepoint to restore", "Job", "Success"


PARAMS = {
    "connection": form.connection(),
    "latest_of": form.optional_text(
        "Latest of",
        "Name or id of the job whose latest good savepoint is restored. Not together with a savepoint.",
        WHAT,
    ),
    "savepoint": form.optional_text("Savepoint", "Path or URL of one savepoint. Not together with *latest of*.", WHAT),
    "directory": form.optional_text(
        "Directory",
        "Directory in which the latest savepoint is searched. If empty, it is the one configured for the job.",
        WHAT,
    ),
    "pipeline": form.text(
        "/opt/pipelines",
        "Pipeline",
        "The program that restores the savepoint: a `.py`, a `.zip` or a folder on the worker.",
        JOB,
    ),
    "entry": form.optional_text(
        "Entry point",
        "module:function. Required if the pipeline has several entry points.",
        JOB,
        pattern=r"^(\s*|[\w.]+:[\w.]+)$",
    ),
    "args": form.arguments("One argument per line.", JOB),
    "parallelism": Param(
        None,
        type=["integer", "null"],
        minimum=1,
        title="Parallelism",
        description="If empty, the pipeline and the session decide. The drill needs that many slots.",
        section=JOB,
    ),
    "configuration": form.options("Options of the job", "Options by key, as for a submission.", JOB),
    "checkpoints": form.number(
        2, "Checkpoints", "Number of checkpoints that have to complete with the restored state.", GOAL, maximum=1000
    ),
    "checkpoint_interval": form.duration(
        "5 s", "Checkpoint interval", "Interval of the drill, instead of the job's.", GOAL
    ),
    "timeout": form.duration("10 min", "Timeout", "The drill fails if it has not passed by then.", GOAL),
    "mark": form.switch(
        True,
        "Record the result",
        "The savepoint catalogue gets the result, which decides whether the savepoint counts as good.",
        GOAL,
    ),
}

with DAG(
    dag_id="ckpt_restore_drill",
    description="Restore a savepoint into a job without side effects, and record whether that worked",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args=form.DEFAULT_ARGS,
    render_template_as_native_obj=True,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_restore_drill:
    RestoreDrillOperator(
        task_id="drill",
        ckpt_conn_id=form.CONNECTION,
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
