"""Orders by minute and country while people order: submit, rescale, patch, upgrade, stop, verify.

The demonstration starts the Kafka broker and places the orders. Nothing waits for the job: while it is rescaled and
upgraded, orders continue to arrive, and each is counted once.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.sdk import DAG, BaseOperator, PokeReturnValue, TriggerRule, XComArg, chain, task
from airflow.sdk.exceptions import AirflowFailException

from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.upgrade import UpgradeJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor

CONNECTION = "ckpt_default"
DATA = Path(os.environ.get("CKPT_DATA", "/tmp/ckpt-data"))
PIPELINES = str(Path(__file__).resolve().parents[2] / "pipelines")
ARGUMENTS = [
    *("--servers", os.environ.get("DEMO_KAFKA", "localhost:9092")),
    *("--customers", str(DATA / "customers.parquet")),
    *("--table", str(DATA / "revenue")),
]
OPTIONS = {"execution.checkpointing.interval": "2 s", "execution.checkpointing.dir": f"file://{DATA}/checkpoints"}
SAVEPOINTS = str(DATA / "savepoints")


def result(operator: BaseOperator, key: str) -> Any:
    """One field of an operator's result, for another task's argument."""
    return XComArg(operator, key)


@task.sensor(poke_interval=1, timeout=300, mode="poke")
def all_minutes() -> PokeReturnValue:
    """Waits until the shop has closed, and the table has every minute of every country."""
    from demo.verify_orders import compared

    if not (DATA / "sent.parquet").exists():
        return PokeReturnValue(is_done=False)
    found = compared(DATA)
    return PokeReturnValue(is_done=found["lost"] == 0, xcom_value=found)


@task(retries=0)
def verify() -> dict[str, int]:
    """Compares the table with the orders that were sent."""
    from demo.verify_orders import compared

    found = compared(DATA)
    if found["lost"] or found["duplicated"] or found["wrong"]:
        raise AirflowFailException(f"the table is wrong: {found}")
    return found


@task(trigger_rule=TriggerRule.ONE_FAILED, retries=0)
def cancel_leftovers() -> None:
    """After a failure, cancels the jobs that are left; the run still counts as failed."""
    from airflow_provider_ckpt.hooks.ckpt import CkptHook

    with CkptHook(CONNECTION).get_conn() as client:
        living = [job.job_id for job in client.list_jobs() if job.end_time_ms < 0]
        for job_id in living:
            client.cancel_job(job_id)
    raise AirflowFailException(f"a task of this run failed; cancelled jobs: {living or 'none'}")


with DAG(
    dag_id="orders_demo",
    description="Orders by minute and country into a Delta table, rescaled and upgraded while people order",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    default_args={"ckpt_conn_id": CONNECTION, "retries": 2, "retry_delay": timedelta(seconds=5)},
    tags=["ckpt"],
    doc_md=__doc__,
) as orders_demo:
    submit = SubmitJobOperator(
        task_id="submit_v1",
        pipeline=PIPELINES,
        entry="orders:pipeline",
        args=ARGUMENTS,
        job_name="orders",
        parallelism=1,
        configuration=OPTIONS,
    )
    first = CheckpointCompletedSensor(
        task_id="checkpoint_of_v1", job=result(submit, "job_id"), since_checkpoint_id=0, timeout=300
    )
    rescale = RescaleJobOperator(task_id="rescale", job="orders", parallelism=2)
    patch = PatchCheckpointConfigOperator(task_id="patch_interval", job="orders", interval="1 s")
    upgrade = UpgradeJobOperator(
        task_id="upgrade_to_v2",
        job="orders",
        pipeline=PIPELINES,
        entry="orders_v2:pipeline",
        args=ARGUMENTS,
        target_directory=SAVEPOINTS,
    )
    second = CheckpointCompletedSensor(
        task_id="checkpoint_of_v2", job=result(upgrade, "job_id"), since_checkpoint_id=0, timeout=300
    )
    complete = all_minutes()
    stop = StopWithSavepointOperator(task_id="stop", job="orders", target_directory=SAVEPOINTS)
    verified = verify()
    chain(submit, first, rescale, patch, upgrade, second, complete, stop, verified)
    chain([submit, upgrade, complete, verified], cancel_leftovers())
