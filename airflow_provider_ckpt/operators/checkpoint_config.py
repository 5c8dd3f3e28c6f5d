"""Changes a running job's checkpoint configuration (FLIP-571)."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration, Templated
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from airflow_provider_ckpt.operators.base import CkptJobOperator
from ckpt_runtime.client import requests
from ckpt_runtime.contract.configuration import CheckpointConfigPatch
from ckpt_runtime.contract.spelling import plain

if TYPE_CHECKING:
    from airflow.sdk import Context

_DURATIONS = {"interval": "interval_ms", "timeout": "timeout_ms"}
_PAUSES = {"min_pause": "min_pause_ms", "aligned_timeout": "aligned_timeout_ms"}
_COUNTS = {"max_concurrent": 1, "tolerable_failed_checkpoints": 0, "max_inflight_data_bytes": 1}


class PatchCheckpointConfigOperator(CkptJobOperator):
    """Changes the given settings and keeps the others; the job is not restarted. Repeating it is harmless.

    Durations are a number of seconds, a text such as ``"90 s"`` or ``"250 ms"``, or a timedelta. While another change
    of the same job is in progress the request is repeated, for ``[ckpt] request_retry_timeout`` seconds at most.

    Returns the configuration that holds now: ``{"interval_ms", "timeout_ms", "min_pause_ms", "max_concurrent",
    "tolerable_failed_checkpoints", "unaligned", "aligned_timeout_ms", "max_inflight_data_bytes", "overrides", ...}``.

    :param job: the job, by id or unique name. (templated)
    :param interval: between the starts of two checkpoints. (templated)
    :param timeout: after which a checkpoint is given up; holds for pending ones as well. (templated)
    :param min_pause: between the end of a checkpoint and the start of the next. (templated)
    :param max_concurrent: checkpoints in flight at the same time. (templated)
    :param tolerable_failed_checkpoints: failures in a row that do not fail the job. (templated)
    :param aligned_timeout: after which an aligned checkpoint turns unaligned. (templated)
    :param unaligned: whether checkpoints are unaligned. (templated)
    :param max_inflight_data_bytes: how much one subtask may persist of its in-flight data. (templated)
    :param reset: return to the submitted values instead; not together with others.
    :raises CkptJobFailed: the job has ended, and its settings cannot change
    """

    template_fields: Collection[str] = (*CkptJobOperator.template_fields, *_DURATIONS, *_PAUSES, *_COUNTS, "unaligned")

    def __init__(  # noqa: PLR0913 - keyword arguments of a DAG author
        self,
        *,
        job: Templated[str],
        interval: Templated[Duration] | None = None,
        timeout: Templated[Duration] | None = None,
        min_pause: Templated[Duration] | None = None,
        max_concurrent: Templated[int | str] | None = None,
        tolerable_failed_checkpoints: Templated[int | str] | None = None,
        aligned_timeout: Templated[Duration] | None = None,
        unaligned: Templated[bool | str] | None = None,
        max_inflight_data_bytes: Templated[int | str] | None = None,
        reset: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.interval = interval
        self.timeout = timeout
        self.min_pause = min_pause
        self.max_concurrent = max_concurrent
        self.tolerable_failed_checkpoints = tolerable_failed_checkpoints
        self.aligned_timeout = aligned_timeout
        self.unaligned = unaligned
        self.max_inflight_data_bytes = max_inflight_data_bytes
        self.reset = arguments.flag("reset", reset)

    def execute(self, context: Context) -> Any:
        patch, deadline = self.patch(), self.deadline()
        job_id = self.find_job(context, deadline)
        call = (
            requests.reset_checkpoint_config(job_id) if self.reset else requests.patch_checkpoint_config(job_id, patch)
        )
        with self.connected(deadline) as client:
            effective = self.change(client, lambda: self.asked_change(client.calls, job_id, call))
        self.forget_job(context)
        result = {"job_id": job_id} | plain(effective)
        self.log.info("Checkpoint configuration of job %s is now: %s", job_id, result)
        return result

    def patch(self) -> CheckpointConfigPatch:
        """Check and return the change.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        values: dict[str, Any] = {}
        for name, field in (_DURATIONS | _PAUSES).items():
            if (given := self._given(name)) is not None:
                values[field] = arguments.millis(name, given, minimum=1 if name in _DURATIONS else 0)
        for name, minimum in _COUNTS.items():
            if (given := self._given(name)) is not None:
                values[name] = arguments.integer(name, given, minimum=minimum)
        if (given := self._given("unaligned")) is not None:
            values["unaligned"] = arguments.boolean("unaligned", given)
        if bool(values) == self.reset:
            names = ", ".join([*_DURATIONS, *_PAUSES, *_COUNTS, "unaligned"])
            raise CkptArgumentInvalid("reset", self.reset, f"give at least one of {names}, or reset=True alone")
        return CheckpointConfigPatch(**values)

    def _given(self, name: str) -> Any:
        """The argument, or ``None`` for one that is not given, also by a template that renders to nothing."""
        value = getattr(self, name)
        return arguments.optional_text(name, value) if isinstance(value, str) else value
