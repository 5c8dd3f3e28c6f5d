"""Changes a running job's configuration (FLIP-530)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.conditions.base import Json
from airflow_provider_ckpt.conditions.job import ConfigurationCondition
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptJobFailed
from airflow_provider_ckpt.operators.base import CkptJobOperator
from airflow_provider_ckpt.tasks import Journal
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.contract.configuration import ConfigChange, OptionChange
from ckpt_runtime.secret_keys import MASK, is_secret_key

if TYPE_CHECKING:
    from airflow.sdk import Context

_RECORD = "ckpt_configuration"


class UpdateJobConfigOperator(CkptJobOperator):
    """Changes options of a running job, and waits until it runs with them. Repeating it is harmless.

    The log has the difference: for each option the value before and after, and whether the job restarts in place, from
    the latest checkpoint. Options that mean the same as before change nothing. While another change of the job is in
    progress the request is repeated, for ``[ckpt] request_retry_timeout`` seconds at most.

    Returns ``{"job_id", "version", "restart", "dry_run", "changes"}``; ``changes`` has for each option ``before``,
    ``after``, ``change`` (``live`` or ``restart``) and ``hidden_by_override``. Values of secrets are masked.

    :param job: the job, by id or unique name. (templated)
    :param configuration: what to change: options to their values, ``None`` removes one. (templated)
    :param replace_all: ``configuration`` is the whole configuration; options that it lacks are removed. (templated)
    :param version: refuse the change unless this is the configuration's present version. (templated)
    :param preview: a dry run: only report the changes and whether they need a restart. (templated)
    :raises CkptJobFailed: the job has ended, and its configuration cannot change, or it failed with the new one
    """

    template_fields: Collection[str] = (
        *CkptJobOperator.template_fields,
        "configuration",
        "replace_all",
        "version",
        "preview",
    )
    template_fields_renderers: ClassVar[dict[str, str]] = {"configuration": "json"}
    failed_wait: ClassVar[type[Exception]] = CkptJobFailed

    def __init__(
        self,
        *,
        job: Templated[str],
        configuration: Templated[Mapping[str, Any]],
        replace_all: Templated[bool | str] = False,
        version: Templated[int | str] | None = None,
        preview: Templated[bool | str] = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(job=job, **kwargs)
        self.configuration = configuration
        self.replace_all = replace_all
        self.version = version
        self.preview = preview

    def execute(self, context: Context) -> Any:
        wanted, dry_run = self.wanted(), arguments.boolean("preview", self.preview)
        deadline = self.deadline()
        job_id = self.find_job(context, deadline)
        with self.connected(deadline) as client:
            # A change that was based on an outdated version is not repeated.
            change = self.change(
                client,
                lambda: self._change(client.calls, job_id, wanted, dry_run=dry_run),
                repeats=self._version() is None,
            )
        result = self._result(context, job_id, change)
        # There is no difference either when the answer to an earlier try was lost: its restart may still be under way.
        if dry_run or (result["changes"] and not result["restart"]):
            return self._succeed(context, result)
        condition = ConfigurationCondition(job_id, result["version"])
        return self.wait_for(context, condition, deadline, {"result": result})

    def wanted(self) -> dict[str, str | None]:
        """Check and return the options.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        given: Any = self.configuration
        if not isinstance(given, Mapping) or not (given or arguments.boolean("replace_all", self.replace_all)):
            allowed = "it must be a mapping of option keys to values, of which None removes the option"
            raise CkptArgumentInvalid("configuration", type(given).__name__ if given else given, allowed)
        removed = {str(key): None for key, value in given.items() if value is None}
        if removed and arguments.boolean("replace_all", self.replace_all):
            raise CkptArgumentInvalid("configuration", sorted(removed), "omit options that are to be removed")
        kept = {key: value for key, value in given.items() if value is not None}
        return arguments.options("configuration", kept) | removed

    def _version(self) -> int | None:
        given = None if self.version in (None, "", "None") else self.version
        return None if given is None else arguments.integer("version", given, minimum=1)

    async def _change(
        self, client: AsyncCalls, job_id: str, wanted: dict[str, str | None], *, dry_run: bool
    ) -> ConfigChange:
        version = self._version()
        if not arguments.boolean("replace_all", self.replace_all):
            call = requests.patch_job_config(job_id, wanted, version, dry_run=dry_run)
        else:
            config = await self.asked(client, requests.job_config(job_id))
            whole = {key: value for key, value in wanted.items() if value is not None}
            call = requests.replace_job_config(job_id, whole, version or config.version or 1, dry_run=dry_run)
        return await self.asked_change(client, job_id, call)

    def _result(self, context: Context, job_id: str, change: ConfigChange) -> Json:
        """Return the result; for a retry whose first try has made the change already, the result of that change."""
        journal = Journal(context, _RECORD)
        record = journal.read()
        if not change.changes and record.get("job_id") == job_id and record.get("version") == change.version:
            self.log.info("An earlier try of this task has made the change")
            return record
        changes = {key: _shown(key, option) for key, option in sorted(change.changes.items())}
        for key, option in changes.items():
            hidden = option["hidden_by_override"]
            text = "%s: %s -> %s (%s)" + (f", hidden by the override {hidden}" if hidden else "")
            self.log.info(text, key, option["before"], option["after"], option["change"])
        if not changes:
            self.log.info("The values are equivalent to the current ones: version %s stays", change.version)
        result = {"job_id": job_id, "version": change.version, "restart": change.restart}
        result |= {"dry_run": change.dry_run, "changes": changes}
        if not change.dry_run:
            journal.write(**result)
        return result

    def reached(self, context: Context, event: Json) -> Any:
        return self._succeed(context, event["trigger"]["memo"]["result"])

    def _succeed(self, context: Context, result: Json) -> Json:
        Journal(context, _RECORD).forget()
        self.forget_job(context)
        verb = "would run with" if result["dry_run"] else "runs with"
        self.log.info("Job %s %s version %s of its configuration", result["job_id"], verb, result["version"])
        return result

    def after_timeout(self, context: Context, event: Json | None) -> str:
        return f"The change is stored and takes effect when job {self.found_job} has been deployed with it"

    def on_kill(self) -> None:
        """Log what becomes of the change."""
        text = "The task was killed; if the change of the configuration of job %s was accepted, it takes effect."
        self.log.warning(text, self.found_job)


def _shown(key: str, option: OptionChange) -> Json:
    def value(found: str | None) -> str | None:
        return MASK if found is not None and is_secret_key(key) else found

    return {
        "before": value(option.before),
        "after": value(option.after),
        "change": option.change,
        "hidden_by_override": option.hidden_by_override,
    }
