"""A DAG with a session of its own around work that fails."""

from __future__ import annotations

from airflow.sdk import DAG, task

from airflow_provider_ckpt.operators.session import StartSessionOperator, StopSessionOperator

with DAG("session_around_work", schedule=None, params={"directory": ""}):
    start = StartSessionOperator(
        task_id="start",
        ckpt_conn_id="ckpt_session",
        work_directory="{{ params.directory }}/work",
        log_directory="{{ params.directory }}/logs",
        reuse_running=False,
        wait_timeout="5 min",
    )
    stop = StopSessionOperator(task_id="stop", ckpt_conn_id="ckpt_session", session=start.output, wait_timeout="2 min")

    @task
    def work(session: dict[str, object]) -> None:
        raise RuntimeError(f"the work with session {session['session_id']} fails")

    with stop.as_teardown(setups=start.as_setup()):
        work(start.output)
