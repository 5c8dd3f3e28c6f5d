"""Takes a savepoint of a running job now, verifies it, and copies it to another directory on request.

The last task's result, or that of ``savepoint``, has the path under ``savepoint_path``. Verification and copy run on
the worker, which needs the extra ``runtime`` and has to reach the storage.
"""

from __future__ import annotations

from airflow.sdk import DAG, chain

from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
from airflow_provider_ckpt.operators.snapshots import CopySavepointOperator, VerifySavepointOperator

_SAVEPOINT = "Savepoint"
_AFTERWARDS = "Afterwards"
_ITS_NAME = "{{ ti.xcom_pull(task_ids='savepoint', key='savepoint_path').rstrip('/').split('/')[-1] }}"

with DAG(
    dag_id="ckpt_savepoint_now",
    description="Take a savepoint of a running job, verify it and copy it",
    schedule=None,
    catchup=False,
    params={
        "job": form.job(),
        "connection": form.connection(),
        "if_not_found": form.if_not_found(),
        "directory": form.text(
            form.savepoint_directory(), "Directory", "Path or URL of the directory for the savepoint.", _SAVEPOINT
        ),
        "format": form.savepoint_format(_SAVEPOINT),
        "verify": form.switch(
            True, "Verify", "Read the whole savepoint, and fail if it is not complete and intact.", _AFTERWARDS
        ),
        "copy_to": form.optional_text(
            "Copy to", "Directory for a copy, also in another file system. If empty, no copy is made.", _AFTERWARDS
        ),
    },
    default_args=form.DEFAULT_ARGS,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_savepoint_now:
    savepoint = TakeSavepointOperator(
        task_id="savepoint",
        job="{{ params.job }}",
        ckpt_conn_id=form.CONNECTION,
        if_not_found="{{ params.if_not_found }}",
        target_directory="{{ params.directory }}",
        savepoint_format="{{ params.format }}",
    )
    verify = VerifySavepointOperator(task_id="verify", savepoint_path=savepoint.savepoint_path)
    copy = CopySavepointOperator(
        task_id="copy", savepoint_path=savepoint.savepoint_path, target=f"{{{{ params.copy_to }}}}/{_ITS_NAME}"
    )
    chain(savepoint, form.gate("verify")(), verify)
    chain(savepoint, form.gate("copy_to")(), copy)
