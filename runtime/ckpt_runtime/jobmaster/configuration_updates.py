"""Changes the configuration of running jobs (FLIP-530): validates the request, plans the pipeline again with the new
configuration, and passes the result to the job's core.

Nothing is stored or in effect before the core accepts it. If the job's plan has changed while the pipeline was being
planned, the core refuses the change. Configurations are compared by the meaning of their values. The cluster defines
the allow-list of what may change while a job runs; each option defines whether it can change at all.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckpt_runtime.checkpoint.configuration import CheckpointConfigurationError, CheckpointOverrides
from ckpt_runtime.configuration.checkpointing_options import CHECKPOINT_SETTINGS
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration, shown_value
from ckpt_runtime.configuration.option import (
    Changeability,
    ConfigOption,
    ConfigurationError,
    InvalidConfigurationError,
    InvalidOptionError,
    OptionScope,
)
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.configuration.registry import RESTORED_MAX_PARALLELISM, canonical_key, find_option
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.contract import configuration as contract
from ckpt_runtime.contract.configuration import ConfigChange
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.executions import wall_clock_ms
from ckpt_runtime.jobmaster.gateway_values import (
    ConfigurationRefused,
    ConfigurationRequest,
    OptionsNotAllowed,
    SubmissionFailed,
    VersionConflict,
)
from ckpt_runtime.jobmaster.job_master import JobMaster
from ckpt_runtime.jobmaster.job_settings import create_restart_strategy, submitted_settings
from ckpt_runtime.jobmaster.planning import Planner
from ckpt_runtime.jobmaster.request_checks import check_directories, with_own_configuration
from ckpt_runtime.scheduler.deployment import JobPlan
from ckpt_runtime.scheduler.replacement import ParallelismBounds, ReplacementRefusedError, check_bounds, with_bounds_of
from ckpt_runtime.secret_keys import MASK
from ckpt_runtime.storage.driver_pools import crash_point

ANY = "*"


@dataclass(frozen=True, slots=True)
class OptionChange:
    """The change of one option. ``before`` and ``after`` are the texts given by the user, None if the option is not
    set."""

    key: str
    before: str | None
    after: str | None

    @property
    def changeability(self) -> Changeability:
        """What the change requires. Users' own keys require a restart, since pipeline code may read them at any
        time."""
        option = find_option(self.key)
        return Changeability.RESTART if option is None else option.changeability

    @property
    def shown(self) -> tuple[str | None, str | None]:
        """Both texts for display."""
        before, after = (None if text is None else shown_value(self.key, text) for text in (self.before, self.after))
        return before, after


def differences(before: Configuration, after: Configuration) -> tuple[OptionChange, ...]:
    """The options whose values differ in meaning, by key; values must be valid. An option that is not given differs
    from one with its default, which the cluster may override, except for options with ``default_equals_absence``."""
    changes = (OptionChange(key, before.get_text(key), after.get_text(key)) for key in {*before, *after})
    return tuple(sorted((change for change in changes if _differs(change)), key=lambda change: change.key))


def _differs(change: OptionChange) -> bool:
    option = find_option(change.key)
    if option is None:
        return change.before != change.after
    return _meaning(option, change.before) != _meaning(option, change.after)


def _meaning(option: ConfigOption[Any], text: str | None) -> tuple[bool, Any]:
    """Returns whether the option is given, and its value."""
    if text is None:
        return option.default_equals_absence, option.default
    return True, option.parse(text)


def check_changeable(changes: Iterable[OptionChange]) -> None:
    """Raises :class:`InvalidConfigurationError` with a line for each option that can never change, and why."""
    problems = [
        InvalidOptionError(
            change.key,
            change.shown[1],
            f"what the job was submitted with, which is {change.shown[0]!r}: {_reason(change.key)}",
        )
        for change in changes
        if change.changeability is Changeability.NEVER
    ]
    if problems:
        raise InvalidConfigurationError(problems)


def _reason(key: str) -> str:
    option = find_option(key)
    assert option is not None
    return option.fixed_because or "it cannot change while a job runs"


def not_allowed(changes: Iterable[OptionChange], allow_list: Iterable[str]) -> tuple[str, ...]:
    """The keys of changed options that are not on the allow-list, on which ``*`` stands for all."""
    allowed = set(allow_list)
    return () if ANY in allowed else tuple(change.key for change in changes if change.key not in allowed)


def with_kept_secrets(given: Configuration, present: Configuration) -> Configuration:
    """Replaces masked secrets in ``given`` by their present values. Raises InvalidConfigurationError without a
    value."""
    kept: dict[str, str | None] = {}
    problems = []
    for key, text in given.items():
        known = present.get_text(key)
        if known is not None and text == shown_value(key, known):
            kept[key] = known
        elif MASK in text and text == shown_value(key, text):
            problems.append(InvalidOptionError(key, text, "a value; this is how one is shown, and the job has no such"))
    if problems:
        raise InvalidConfigurationError(problems)
    return given.with_values(kept)


_HIDES = {setting.option.key: (setting.field, setting.patched_as) for setting in CHECKPOINT_SETTINGS}


class ConfigurationUpdates:
    """The updates of all jobs. ``allow_list`` has the keys of options that may change, or ``*``."""

    def __init__(self, planner: Planner, allow_list: Sequence[str]) -> None:
        self._planner = planner
        self._allow_list = tuple(canonical_key(key) for key in allow_list)
        self._in_progress: dict[str, tuple[ConfigurationRequest, asyncio.Task[ConfigChange]]] = {}

    async def change(self, job: JobMaster, request: ConfigurationRequest) -> ConfigChange:
        """Changes a job's configuration, even if the client disconnects; an identical request during the change joins
        it. Raises as ``Dispatcher.change_job_config``."""
        known = self._in_progress.get(job.job_id)
        if known is not None and replace(known[0], by=request.by) == request:
            return await asyncio.shield(known[1])
        task = asyncio.get_running_loop().create_task(self._change(job, request))
        self._in_progress[job.job_id] = (request, task)
        task.add_done_callback(lambda done: self._done(job.job_id, done))
        return await asyncio.shield(task)

    def _done(self, job_id: str, task: asyncio.Task[ConfigChange]) -> None:
        # A later request may have replaced this one.
        if self._in_progress.get(job_id, (None, None))[1] is task:
            del self._in_progress[job_id]
        if not task.cancelled():
            task.exception()  # the client may have disconnected, and asyncio logs an error that is never retrieved

    async def _change(self, job: JobMaster, request: ConfigurationRequest) -> ConfigChange:
        # Compared by identity later: planning takes seconds, and the core refuses a change based on another plan.
        base = job.accepted_plan
        present = base.own
        wanted = wanted_configuration(present.given, request)
        if not differences(present.given, wanted):
            return ConfigChange(present.version, False, request.dry_run, {})
        if request.version not in (None, present.version):
            raise VersionConflict(job.job_id, request.version, present.version)
        job.check_configurable()
        crash_point("configuration-received")
        # The pipeline itself may set an option that the request leaves out: that is known only after planning.
        given_now = [change for change in differences(present.given, wanted) if change.after is not None]
        judge(given_now, self._allow_list)
        # The number of key groups of existing state cannot change.
        maxima = {node.uid: vertex.max_parallelism for vertex in base.graph.vertices for node in vertex.operators}
        planned, own = await self._planner.plan_again(
            job.program(), wanted.with_values({RESTORED_MAX_PARALLELISM: json.dumps(maxima)})
        )
        given = _refusing(lambda: with_own_configuration(own, wanted))
        changes = differences(present.given, given)
        if not changes:
            return ConfigChange(present.version, False, request.dry_run, {})
        judge(changes, self._allow_list)
        keys = tuple(change.key for change in changes)
        graph = _graph(planned, base.graph, keeps_parallelism=PipelineOptions.PARALLELISM.key not in keys)
        note = ChangeNote(present.version + 1, wall_clock_ms(), request.by, keys)
        plan = _plan(job, base, graph, given, note)
        answer = config_change(note.version, changes, job.overrides, dry_run=request.dry_run)
        if not request.dry_run:
            before, after = (create_restart_strategy(known.configuration) for known in (base, plan))
            strategy = None if before == after else after
            crash_point("configuration-validated")
            await job.change_configuration(plan, base, strategy, restarts=answer.restart)
        return answer


def judge(changes: Sequence[OptionChange], allow_list: Sequence[str]) -> None:
    """Raises ConfigurationRefused for options that can never change, OptionsNotAllowed for others not on the list."""
    try:
        check_changeable(changes)
    except ConfigurationError as error:
        raise ConfigurationRefused(str(error)) from error
    if refused := not_allowed(changes, allow_list):
        raise OptionsNotAllowed(refused, allow_list)


def wanted_configuration(present: Configuration, request: ConfigurationRequest) -> Configuration:
    """The whole requested configuration, checked. Raises ConfigurationRefused."""
    try:
        if request.partial:
            wanted = present.with_values(request.options)
        else:
            wanted = Configuration({key: text for key, text in request.options.items() if text is not None})
        wanted = with_kept_secrets(wanted, present)
        validate(wanted, OptionScope.JOB)
        check_directories(wanted)
    except (ConfigurationError, SubmissionFailed) as error:
        raise ConfigurationRefused(str(error)) from error
    return wanted


def _refusing(call: Callable[[], Configuration]) -> Configuration:
    try:
        return call()
    except SubmissionFailed as error:
        raise ConfigurationRefused(str(error)) from error


def _graph(planned: JobGraph, present: JobGraph, *, keeps_parallelism: bool) -> JobGraph:
    """The graph for the job to run, with the same operators as now. Raises ConfigurationRefused for others."""
    if planned.plan_fingerprint != present.plan_fingerprint:
        raise ConfigurationRefused(
            "with this configuration the pipeline builds another plan than the job's; submit it again from a savepoint"
        )
    parallelism = {vertex.id: vertex.parallelism for vertex in present.vertices}
    if keeps_parallelism:
        kept = planned if planned.vertices == present.vertices else planned.with_parallelism(parallelism)
        return with_bounds_of(kept, present)
    wanted = {vertex.id: ParallelismBounds(vertex.parallelism, vertex.parallelism) for vertex in planned.vertices}
    try:
        check_bounds(present, wanted)
    except ReplacementRefusedError as error:
        raise ConfigurationRefused(f"{PipelineOptions.PARALLELISM.key}: {error}") from error
    return planned


def _plan(job: JobMaster, base: JobPlan, graph: JobGraph, given: Configuration, note: ChangeNote) -> JobPlan:
    """The new plan, whose settings have to be valid with and without overrides."""
    configuration = Configuration.merge(job.defaults, given)
    try:
        settings = submitted_settings(configuration, graph.transaction_timeout_ms)
        settings.effective()
        job.overrides.applied_to(settings)
    except (ConfigurationError, CheckpointConfigurationError) as error:
        raise ConfigurationRefused(str(error)) from error
    own = base.own.changed(given, note)
    return replace(base, graph=graph, configuration=configuration, settings=settings, own=own)


def config_change(
    version: int, changes: Sequence[OptionChange], overrides: CheckpointOverrides, *, dry_run: bool
) -> ConfigChange:
    """The answer to a change: for each option, whether it needs a restart, and which override hides it."""

    def shown(change: OptionChange) -> contract.OptionChange:
        field, name = _HIDES.get(change.key, ("", None))
        kind = "restart" if change.changeability is Changeability.RESTART else "live"
        return contract.OptionChange(*change.shown, kind, name if field in overrides.given else None)

    found = {change.key: shown(change) for change in changes}
    return ConfigChange(version, any(change.change == "restart" for change in found.values()), dry_run, found)
