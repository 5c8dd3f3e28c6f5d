"""The life of a stream job, end to end: submit, patch, savepoint, stop, resume as a new version, verify exactly once.

Start it from the trigger form, where every path and duration is a parameter. It needs a session that answers at the
connection ``ckpt_default``, and the flights in Parquet (``python pipelines/prepare_flights.py <input_path>``).

Besides Airflow's own import, this file loads nothing heavy; Spark runs in a separate process in the last task.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, TriggerRule, chain, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor

CONNECTION = os.environ.get("CKPT_CONN_ID", "ckpt_default")
PIPELINES = os.environ.get("CKPT_PIPELINES", str(Path(__file__).resolve().parents[2] / "pipelines"))
RETRY_TIMEOUT_SECONDS = 180.0
"""How long a request of the DAG's own tasks is repeated while the session is away."""
DATA = os.environ.get("CKPT_DATA", str(Path.home() / "ckpt-data"))


_PROGRAMS, _FILES, _SPEED, _TIMES = "Programs", "Files", "Speed", "Checkpoints"

PARAMS = {
    "pipelines": form.text(PIPELINES, "Folder of the pipelines", "A folder on the worker.", _PROGRAMS),
    "entry_v1": form.text("flights:pipeline", "Entry point of version 1", "module:function.", _PROGRAMS),
    "entry_v2": form.text("flights_v2:pipeline", "Entry point of version 2", "module:function.", _PROGRAMS),
    "verifier": form.text(
        f"{PIPELINES}/verify_flights.py",
        "Verifier",
        "The script that compares the results with Spark SQL, on the worker.",
        _PROGRAMS,
    ),
    "input": form.text(f"{DATA}/flights.parquet", "Flights", "The input, a Parquet file.", _FILES),
    "output": form.text(
        f"{DATA}/output", "Directory for the results", "Each run gets its own directory in it.", _FILES
    ),
    "savepoints": form.text(f"{DATA}/savepoints", "Directory for savepoints", "The session writes there.", _FILES),
    "checkpoints": form.text(f"{DATA}/checkpoints", "Directory for checkpoints", "The session writes there.", _FILES),
    "parallelism": form.number(2, "Parallelism", "Parallelism of both versions.", _SPEED),
    "rows_per_second": form.number(
        3000, "Rows per second of version 1", "0 means unlimited.", _SPEED, kind="number", minimum=0
    ),
    "rows_per_second_v2": form.number(
        20000, "Rows per second of version 2", "0 means unlimited.", _SPEED, kind="number", minimum=0
    ),
    "interval": form.duration("2 s", "Checkpoint interval", "The interval at submission.", _TIMES),
    "timeout": form.duration("60 s", "Checkpoint timeout", "The timeout at submission.", _TIMES),
    "new_interval": form.duration("1 s", "New checkpoint interval", "The interval after the patch.", _TIMES),
    "new_timeout": form.duration("90 s", "New checkpoint timeout", "The timeout after the patch.", _TIMES),
    "configuration": form.options("Further options", "Options of both jobs. Secrets are refused.", _SPEED),
}

DEFAULTS: dict[str, Any] = {"ckpt_conn_id": CONNECTION, "retries": 2, "retry_delay": timedelta(seconds=5)}


def arguments(rate: str) -> list[str]:
    """The pipeline's arguments; ``rate`` names the parameter with the replayed rows per second."""
    output = "{{ ti.xcom_pull(task_ids='output_directory') }}"
    paths = ["--input", "{{ params.input }}", "--output", output]
    return [*paths, "--rows-per-second", f"{{{{ params.{rate} }}}}"]


def directory_of_run(output: str, run_id: str) -> Path:
    """Return the directory for one run's results.

    :raises AirflowFailException: when the directory is not empty: rows of two runs would be counted together.
    """
    directory = Path(output) / re.sub(r"[^A-Za-z0-9_-]+", "_", run_id)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise AirflowFailException(
            f"output: {str(directory)!r} is not empty: an earlier try of this run has written there. "
            "Trigger another run, or move the directory away"
        )
    return directory


@task(retries=0)
def output_directory(params: dict[str, Any] | None = None, run_id: str | None = None) -> str:
    """Return the run's own directory for results, checked before anything is started."""
    return str(directory_of_run(dict(params or {})["output"], str(run_id)))


@task
def job_options(params: dict[str, Any] | None = None) -> dict[str, Any]:
    """The options of both versions: those from the form's own fields, and any others that are given."""
    given = dict(params or {})
    return {
        "execution.checkpointing.interval": given["interval"],
        "execution.checkpointing.timeout": given["timeout"],
        "execution.checkpointing.dir": f"file://{given['checkpoints']}",
        **given["configuration"],
    }


@task
def assert_patched(job_id: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Ask the job manager for the current configuration, and compare it with the requested one."""
    from airflow_provider_ckpt.arguments import millis
    from airflow_provider_ckpt.hooks.ckpt import CkptHook

    wanted = dict(params or {})
    with CkptHook(CONNECTION).get_conn(retry_timeout=RETRY_TIMEOUT_SECONDS) as client:
        config = client.checkpoint_config(job_id)
    found = {"interval_ms": config.interval_ms, "timeout_ms": config.timeout_ms}
    expected = {
        "interval_ms": millis("new_interval", wanted["new_interval"]),
        "timeout_ms": millis("new_timeout", wanted["new_timeout"]),
    }
    if found != expected:
        raise ValueError(f"the job manager reports {found}, but {expected} was requested")
    return found


@task(execution_timeout=timedelta(minutes=20), retries=0)
def verify(output: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
    """Compare the results with an answer that Spark SQL computes from the input alone, in a separate process."""
    import json
    import subprocess
    import sys

    given = dict(params or {})
    command = [sys.executable, given["verifier"], given["input"], output]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr[-4000:])
    print(done.stdout[-4000:])
    if done.returncode != 0:
        raise ValueError(f"the results are wrong (code {done.returncode}): {done.stdout[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


@task(trigger_rule=TriggerRule.ONE_FAILED, retries=0)
def cancel_leftovers(ti: Any = None) -> None:
    """After a failure, cancel any job of the run that is left; the run still counts as failed."""
    from airflow_provider_ckpt.hooks.ckpt import CkptHook

    job_ids = [ti.xcom_pull(task_ids=task_id, key="job_id") for task_id in ("submit_v1", "resume_v2")]
    cancelled = []
    with CkptHook(CONNECTION).get_conn(retry_timeout=RETRY_TIMEOUT_SECONDS) as client:
        living = {job.job_id for job in client.list_jobs() if job.end_time_ms < 0}
        for job_id in living.intersection(job_ids):
            client.cancel_job(job_id)
            cancelled.append(job_id)
    raise AirflowFailException(f"a task of this run failed; cancelled jobs: {cancelled or 'none'}")


with DAG(
    dag_id="ckpt_lifecycle",
    description="Submit, patch, savepoint, stop, resume as version 2, and verify exactly once",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args=DEFAULTS,
    render_template_as_native_obj=True,
    tags=["ckpt"],
    doc_md=__doc__,
) as ckpt_lifecycle:
    output: Any = output_directory()
    configuration: Any = job_options()

    submit_v1 = SubmitJobOperator(
        task_id="submit_v1",
        pipeline="{{ params.pipelines }}",
        entry="{{ params.entry_v1 }}",
        args=arguments("rows_per_second"),
        parallelism="{{ params.parallelism }}",
        configuration=configuration,
    )
    job_v1: Any = submit_v1.job_id

    checkpoint_v1 = CheckpointCompletedSensor(
        task_id="checkpoint_of_v1", job=job_v1, since_checkpoint_id=0, timeout=300
    )
    patch = PatchCheckpointConfigOperator(
        task_id="patch_interval_and_timeout",
        job=job_v1,
        interval="{{ params.new_interval }}",
        timeout="{{ params.new_timeout }}",
    )
    patched = assert_patched(job_v1)
    savepoint = TakeSavepointOperator(
        task_id="native_savepoint", job=job_v1, target_directory="{{ params.savepoints }}"
    )
    stop_v1 = StopWithSavepointOperator(
        task_id="stop_v1_with_savepoint", job=job_v1, target_directory="{{ params.savepoints }}"
    )
    saved: Any = stop_v1.savepoint_path

    resume_v2 = SubmitJobOperator(
        task_id="resume_v2",
        pipeline="{{ params.pipelines }}",
        entry="{{ params.entry_v2 }}",
        args=arguments("rows_per_second_v2"),
        parallelism="{{ params.parallelism }}",
        configuration=configuration,
        savepoint_path=saved,
    )
    job_v2: Any = resume_v2.job_id

    checkpoint_v2 = CheckpointCompletedSensor(
        task_id="checkpoint_of_v2", job=job_v2, since_checkpoint_id=0, timeout=300
    )
    end_v2 = JobStatusSensor(task_id="end_of_v2", job=job_v2, expected="FINISHED", timeout=1800)
    verified = verify(output)

    chain(
        output,
        configuration,
        submit_v1,
        checkpoint_v1,
        patch,
        patched,
        savepoint,
        stop_v1,
        resume_v2,
        checkpoint_v2,
        end_v2,
        verified,
    )
    chain([stop_v1, end_v2, verified], cancel_leftovers())
