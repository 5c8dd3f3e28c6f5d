"""Watches a job's pending checkpoints, and extends the timeout of one that is nearly done when it is about to expire.

A checkpoint that is 95 % done when its ten minutes are over has written nearly all of its state for nothing. Five more
minutes, and it completes seconds later; afterwards the timeout is what it was. A run ends with the checkpoint that it
has rescued, or when its time is over. To watch all the time, set the environment variables ``CKPT_RESCUE_SCHEDULE``
(such as ``@continuous``) and ``CKPT_RESCUE_JOB`` where DAGs are parsed.
"""

from __future__ import annotations

import os

from airflow.sdk import DAG, Param

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.rescue import RescueCheckpointOperator

_WHEN = "When"
_WHAT = "What"

with DAG(
    dag_id="ckpt_rescue",
    description="Give a checkpoint that is nearly done more time before it expires",
    schedule=os.environ.get("CKPT_RESCUE_SCHEDULE") or None,
    catchup=False,
    max_active_runs=1,
    params={
        "job": form.job(os.environ.get("CKPT_RESCUE_JOB", "")),
        "connection": form.connection(),
        "if_not_found": form.if_not_found(),
        "min_progress": Param(
            95,
            type="number",
            minimum=0,
            maximum=100,
            title="Nearly done",
            description="Percent of the subtasks that must have acknowledged the checkpoint.",
            section=_WHEN,
        ),
        "within": form.duration("15 s", "About to expire", "How much time it may have left.", _WHEN),
        "watch_for": form.duration("1 h", "Watch for", "How long one run watches.", _WHEN),
        "extension": form.duration("5 min", "More time", "By how much the timeout grows, again and again.", _WHAT),
        "max_timeout": form.duration("1 h", "Longest timeout", "What it may come to at most.", _WHAT),
    },
    default_args=form.DEFAULT_ARGS,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_rescue:
    RescueCheckpointOperator(
        task_id="rescue",
        job="{{ params.job }}",
        ckpt_conn_id=form.CONNECTION,
        if_not_found="{{ params.if_not_found }}",
        min_progress="{{ params.min_progress }}",
        within="{{ params.within }}",
        extension="{{ params.extension }}",
        max_timeout="{{ params.max_timeout }}",
        wait_timeout="{{ params.watch_for }}",
    )
