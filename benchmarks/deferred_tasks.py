"""Deferred tasks without workers: ``python -m benchmarks.deferred_tasks RUN_ID`` in the environment of an Airflow.

Reads triggers as JSON from stdin, ``[[class, keyword arguments], ...]``, and writes the same rows into the database as
a worker that defers a task: for each a trigger, and an instance of the DAG's task that waits for it, by its map index.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from typing import Any

from airflow.models.serialized_dag import SerializedDagModel
from airflow.models.taskinstance import TaskInstance
from airflow.models.trigger import Trigger
from airflow.utils.session import create_session
from airflow.utils.state import DagRunState, TaskInstanceState
from airflow.utils.types import DagRunTriggeredByType, DagRunType

DAG_ID, TASK_ID = "benchmark_waits", "wait"


def defer(run_id: str, triggers: list[tuple[str, dict[str, Any]]]) -> None:
    """All at once."""
    with create_session() as session:
        stored = SerializedDagModel.get(DAG_ID, session=session)
        if stored is None:
            raise LookupError(f"DAG {DAG_ID} is not in the database")
        stored.dag.create_dagrun(
            run_id=run_id,
            run_after=datetime.now(UTC),
            run_type=DagRunType.MANUAL,
            triggered_by=DagRunTriggeredByType.TEST,
            state=DagRunState.RUNNING,
            session=session,
        )
        rows = [Trigger(classpath=classpath, kwargs=arguments) for classpath, arguments in triggers]
        session.add_all(rows)
        session.flush()
        task = stored.dag.get_task(TASK_ID)
        for index, row in enumerate(rows):
            instance = TaskInstance(
                task, stored.dag_version_id, run_id=run_id, state=TaskInstanceState.DEFERRED, map_index=index
            )
            instance.try_number = 1
            instance.trigger_id = row.id
            instance.next_method, instance.next_kwargs = "execute_complete", {}
            session.add(instance)


if __name__ == "__main__":
    defer(sys.argv[1], json.load(sys.stdin))
