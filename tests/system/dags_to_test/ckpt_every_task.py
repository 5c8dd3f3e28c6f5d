"""A DAG with every operator and sensor of the provider that needs a session, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from airflow.sdk import DAG, chain

from airflow_provider_ckpt.operators.cancel import CancelJobOperator
from airflow_provider_ckpt.operators.checkpoint import TriggerCheckpointOperator
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.operators.dispose import DisposeSavepointOperator
from airflow_provider_ckpt.operators.drill import RestoreDrillOperator
from airflow_provider_ckpt.operators.job_config import UpdateJobConfigOperator
from airflow_provider_ckpt.operators.rescale import RescaleJobOperator
from airflow_provider_ckpt.operators.retention import CleanUpSavepointsOperator
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.snapshots import CopySavepointOperator, VerifySavepointOperator
from airflow_provider_ckpt.operators.stop import StopWithSavepointOperator
from airflow_provider_ckpt.operators.submit import SubmitJobOperator
from airflow_provider_ckpt.operators.suspend import ResumeJobOperator, SuspendJobOperator
from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor, SavepointCompletedSensor
from airflow_provider_ckpt.sensors.health import CheckpointHealthSensor
from airflow_provider_ckpt.sensors.job import JobStatusSensor

DIRECTORY = "{{ params.directory }}"
PROGRAM: dict[str, Any] = {
    "pipeline": str(Path(__file__).parents[2] / "support" / "pipelines"),
    "entry": "sequence:pipeline",
    "args": ["--output", f"{DIRECTORY}/out", "--rate", "500", "--batch", "64"],
    "parallelism": "{{ params.parallelism }}",
    "configuration": {
        "execution.checkpointing.dir": f"{DIRECTORY}/checkpoints",
        "execution.checkpointing.interval": "{{ params.interval }}",
        "execution.checkpointing.savepoint-dir": f"{DIRECTORY}/savepoints",
    },
}
WAITS = {"poll_interval": 0.2, "poke_interval": 0.2, "wait_timeout": "2 min", "timeout": 120, "healthy_timeout": "60 s"}

with DAG(
    "every_task", schedule=None, params={"directory": "", "parallelism": 2, "interval": "500 ms"}, default_args=WAITS
):
    submit = SubmitJobOperator(task_id="submit", job_name="every task", **PROGRAM)
    running = JobStatusSensor(task_id="running", job=submit.job_id, expected="{{ 'running' }}")
    checkpoint = TriggerCheckpointOperator(task_id="checkpoint", job="every task")
    newer = CheckpointCompletedSensor(task_id="newer", job=submit.output, since_checkpoint_id=checkpoint.checkpoint_id)
    savepoint = TakeSavepointOperator(task_id="savepoint", job=submit.job_id)
    saved = SavepointCompletedSensor(task_id="saved", job=submit.job_id, since_checkpoint_id=0)
    well = CheckpointHealthSensor(task_id="well", job=submit.job_id, expected=["HEALTHY", "DEGRADED"])
    patch = PatchCheckpointConfigOperator(task_id="patch", job=submit.job_id, timeout="5 min")
    configure = UpdateJobConfigOperator(
        task_id="configure",
        job=submit.job_id,
        configuration={"execution.checkpointing.interval": "400 ms"},
        preview="{{ true }}",
    )
    rescale = RescaleJobOperator(task_id="rescale", job=submit.job_id, parallelism="{{ params.parallelism - 1 }}")
    verify = VerifySavepointOperator(task_id="verify", savepoint_path=savepoint.output)
    copy = CopySavepointOperator(task_id="copy", savepoint_path=savepoint.output, target=f"{DIRECTORY}/copy")
    drill = RestoreDrillOperator(task_id="drill", savepoint_path=copy.savepoint_path, **PROGRAM)
    upgrade = UpgradeJobOperator(task_id="upgrade", job=submit.job_id, pause_before_start=True, **PROGRAM)
    finish = FinishUpgradeOperator(task_id="finish", upgrade=upgrade.output, approve=True)
    suspend = SuspendJobOperator(task_id="suspend", job=finish.output)
    resume = ResumeJobOperator(task_id="resume", job=suspend.output)
    stop = StopWithSavepointOperator(task_id="stop", job=resume.output)
    again = SubmitJobOperator(task_id="again", savepoint_path=stop.savepoint_path, **PROGRAM)
    cancel = CancelJobOperator(task_id="cancel", job=again.job_id)
    clean = CleanUpSavepointsOperator(task_id="clean", directory=f"{DIRECTORY}/savepoints", keep=1)
    dispose = DisposeSavepointOperator(task_id="dispose", savepoint_path=copy.output)
    chain(submit, running, checkpoint, newer, savepoint, saved, well, patch, configure, rescale, verify, copy)
    chain(copy, drill, upgrade, finish, suspend, resume, stop, again, cancel, clean, dispose)
