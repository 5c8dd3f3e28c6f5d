"""Replace a running job by another version of its program, after a person has approved what happens to its state.

Start it from the trigger form. The old version stops with a savepoint, and the DAG asks for an approval that shows the
difference of the state. Then the new version is started from the savepoint; if it is rejected, or does not become
healthy, the old version is started instead. Two versions never run at the same time.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk import DAG, Param, TriggerRule, XComArg, chain

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.dags import _params as form
from airflow_provider_ckpt.operators.upgrade import FinishUpgradeOperator, UpgradeJobOperator

APPROVE, REJECT = "Start the new version", "Go back to the old version"
_STOP, _APPROVAL = "stop_with_savepoint", "approval"
_PULLED = f"ti.xcom_pull(task_ids='{_APPROVAL}')"
_SECTIONS = ("New version", "End of the old version", "Health of the new version", "Approval")


PARAMS = {
    "job": form.job(),
    "connection": form.connection(),
    "pipeline": form.optional_text(
        "Pipeline of the new version", "A .py, a .zip or a directory on the worker.", _SECTIONS[0]
    ),
    "pipeline_id": form.optional_text("Pipeline id", "Id of an uploaded pipeline, instead of a path.", _SECTIONS[0]),
    "entry": form.optional_text(
        "Entry point", "module:function. If empty, that of the old version.", _SECTIONS[0], pattern=r"^[\w.]+:[\w.]+$"
    ),
    "args": form.arguments("One argument per line. If empty, those of the old version.", _SECTIONS[0]),
    "configuration": form.options(
        "Options", "Options that override those of the old version. Secrets are refused.", _SECTIONS[0]
    ),
    "allow_non_restored_state": form.switch(
        False,
        "Drop state that the new version does not have",
        "If off, such an upgrade is refused before anything is stopped.",
        _SECTIONS[0],
    ),
    "mode": Param(
        "savepoint",
        type="string",
        enum=["savepoint", "last-state", "stateless"],
        values_display={
            "savepoint": "savepoint: the old version stops with one",
            "last-state": "last-state: the old version is cancelled, and its latest checkpoint is retained",
            "stateless": "stateless: the new version starts without state",
        },
        title="Mode",
        description="What the new version starts from.",
        section=_SECTIONS[1],
    ),
    "last_state_max_age": form.optional_text(
        "Fall back to a checkpoint no older than",
        "Used if no savepoint can be taken. If empty, there is no fallback.",
        _SECTIONS[1],
        pattern=form.DURATION,
    ),
    "target_directory": form.optional_text("Directory of the savepoint", "If empty, the job's default.", _SECTIONS[1]),
    "savepoint_format": form.savepoint_format(_SECTIONS[1]),
    "savepoint_timeout": form.duration(
        "10 min",
        "Savepoint timeout",
        "After this time the upgrade falls back to a checkpoint, or is refused.",
        _SECTIONS[1],
    ),
    "healthy_checkpoints": form.number(
        1, "Completed checkpoints", "Number of checkpoints that the new version has to complete.", _SECTIONS[2]
    ),
    "healthy_timeout": form.duration(
        "5 min", "Health timeout", "After this time the old version is started again.", _SECTIONS[2]
    ),
    "approval": form.switch(
        True,
        "Ask for an approval before the start of the new version",
        "Nothing runs meanwhile. Without an answer in an hour, the old version is started again.",
        _SECTIONS[3],
    ),
}


class UpgradeApproval(HITLOperator):
    """Asks for an approval, unless ``ask`` is off; no answer counts as a rejection.

    :param ask: whether to ask. (templated)
    """

    template_fields = (*HITLOperator.template_fields, "ask")

    def __init__(self, *, ask: Any = True, **kwargs: Any) -> None:
        super().__init__(options=[APPROVE, REJECT], defaults=REJECT, **kwargs)
        self.ask = ask

    def execute(self, context: Any) -> Any:
        """Wait for an answer, or approve at once."""
        if not arguments.boolean("ask", self.ask):
            return {"chosen_options": [APPROVE], "params_input": {}, "responded_by_user": None}
        return super().execute(context)


_BODY = f"""{{% set found = ti.xcom_pull(task_ids='{_STOP}') or {{}} %}}
Job **{{{{ found.get('name') }}}}** (`{{{{ found.get('old_job_id') }}}}`) has ended, and nothing runs.

* program: `{{{{ found.get('old_pipeline_id') }}}}` becomes `{{{{ found.get('pipeline_id') }}}}`
* the new version starts from: `{{{{ found.get('savepoint_path') }}}}` (mode {{{{ found.get('mode') }}}})
{{% if found.get('why') %}}* reason: {{{{ found.get('why') }}}}{{% endif %}}

State:
{{% for line in found.get('diff') or ['no state is taken over'] %}}
* {{{{ line }}}}{{% endfor %}}
"""

with DAG(
    dag_id="ckpt_upgrade",
    description="Replace a job by another version of it, with an approval, and roll back when that is not healthy",
    schedule=None,
    catchup=False,
    max_active_runs=1,
    params=PARAMS,
    default_args=form.DEFAULT_ARGS,
    render_template_as_native_obj=True,
    tags=form.TAGS,
    doc_md=__doc__,
) as ckpt_upgrade:
    stop = UpgradeJobOperator(
        task_id=_STOP,
        ckpt_conn_id=form.CONNECTION,
        job="{{ params.job }}",
        pipeline="{{ params.pipeline }}",
        pipeline_id="{{ params.pipeline_id }}",
        entry="{{ params.entry }}",
        args="{{ params.args }}",
        configuration="{{ params.configuration }}",  # type: ignore[arg-type] # rendered as a mapping
        allow_non_restored_state="{{ params.allow_non_restored_state }}",
        mode="{{ params.mode }}",
        last_state_max_age="{{ params.last_state_max_age }}",
        target_directory="{{ params.target_directory }}",
        savepoint_format="{{ params.savepoint_format }}",
        savepoint_timeout="{{ params.savepoint_timeout }}",
        healthy_timeout="{{ params.healthy_timeout }}",
        healthy_checkpoints="{{ params.healthy_checkpoints }}",
        pause_before_start=True,
    )
    approval = UpgradeApproval(
        task_id=_APPROVAL,
        ask="{{ params.approval }}",
        subject="Upgrade of job {{ params.job }}",
        body=_BODY,
        # Airflow fails a waiting task that is answered in its first five seconds; the retry asks again.
        response_timeout=timedelta(hours=1),
    )
    resume = FinishUpgradeOperator(
        task_id="start_and_watch",
        ckpt_conn_id=form.CONNECTION,
        upgrade=XComArg(stop, "upgrade"),
        approve=f"{{{{ '{APPROVE}' in (({_PULLED}) or {{}}).get('chosen_options', []) }}}}",
        approved_by=f"{{{{ ((({_PULLED}) or {{}}).get('responded_by_user') or {{}}).get('name', '') }}}}",
        healthy_timeout="{{ params.healthy_timeout }}",
        savepoint_timeout="{{ params.savepoint_timeout }}",
        # Also when the approval was marked failed: the old version is then started again. Not when nothing was stopped.
        trigger_rule=TriggerRule.ALL_DONE_MIN_ONE_SUCCESS,
    )
    chain(stop, approval, resume)
