"""Changes the checkpoint configuration of a running job, without a restart (FLIP-571).

Only the fields that are filled in change. A new timeout holds for pending checkpoints as well. The change survives
restarts of the job and of its driver.
"""

from __future__ import annotations

from airflow.sdk import DAG, Param, chain

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.checkpoint_config import PatchCheckpointConfigOperator
from airflow_provider_ckpt.sensors.checkpoint import CheckpointCompletedSensor

_TIMES = "Times"
_LIMITS = "Limits"
_UNALIGNED = "Unaligned checkpoints"

with DAG(
    dag_id="ckpt_patch",
    description="Change the checkpoint configuration of a running job",
    schedule=None,
    catchup=False,
    params={
        "job": form.job(),
        "connection": form.connection(),
        "interval": form.optional_duration("Interval", "Time between the starts of two checkpoints.", _TIMES),
        "timeout": form.optional_duration(
            "Timeout", "Time after which a checkpoint is aborted. It also applies to pending checkpoints.", _TIMES
        ),
        "min_pause": form.optional_duration(
            "Minimum pause", "Minimum time between the end of a checkpoint and the start of the next.", _TIMES
        ),
        "max_concurrent": form.optional_integer(
            "Max concurrent checkpoints", "Maximum number of checkpoints in progress at once.", _LIMITS, 1
        ),
        "tolerable_failed_checkpoints": form.optional_integer(
            "Tolerable failures", "Number of consecutive failed checkpoints that do not fail the job.", _LIMITS, 0
        ),
        "unaligned": Param(
            None,
            type=["null", "boolean"],
            title="Unaligned",
            description="Whether barriers may overtake rows. Leave it empty for no change.",
            section=_UNALIGNED,
        ),
        "aligned_timeout": form.optional_duration(
            "Aligned checkpoint timeout", "Time after which an aligned checkpoint becomes unaligned.", _UNALIGNED
        ),
        "max_inflight_data_bytes": form.optional_integer(
            "In-flight bytes", "Maximum amount of in-flight data that one subtask may persist.", _UNALIGNED, 1
        ),
        "wait": form.switch(
            True, "Wait for a checkpoint", "The run ends when the next checkpoint has completed.", "Afterwards"
        ),
    },
    default_args=form.DEFAULT_ARGS,
    render_template_as_native_obj=True,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_patch:
    patch = PatchCheckpointConfigOperator(
        task_id="patch",
        job="{{ params.job }}",
        ckpt_conn_id=form.CONNECTION,
        interval="{{ params.interval }}",
        timeout="{{ params.timeout }}",
        min_pause="{{ params.min_pause }}",
        max_concurrent="{{ params.max_concurrent }}",
        tolerable_failed_checkpoints="{{ params.tolerable_failed_checkpoints }}",
        unaligned="{{ params.unaligned }}",
        aligned_timeout="{{ params.aligned_timeout }}",
        max_inflight_data_bytes="{{ params.max_inflight_data_bytes }}",
    )
    checkpoint = CheckpointCompletedSensor(
        task_id="next_checkpoint", job=patch.job_id, ckpt_conn_id=form.CONNECTION, timeout=3600
    )
    chain(patch, form.gate("wait")(), checkpoint)
