"""Planted bugs of what joins the job machine and the coordinator: order, attempts, replacements, settings, the end."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ckpt_runtime.checkpoint import events as checkpoint_on
from ckpt_runtime.checkpoint.executions import ExecutionView
from ckpt_runtime.checkpoint.triggering import Triggering
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.jobmaster import job_record
from ckpt_runtime.scheduler import core_events as core
from ckpt_runtime.scheduler import durable_change, job_core
from ckpt_runtime.scheduler import job_events as job_on
from ckpt_runtime.scheduler.durable_change import DurableChange, Next, PlanChange, SettingsUpdate
from ckpt_runtime.scheduler.job_core import JobCore
from ckpt_runtime.scheduler.job_machine import JobMachine
from ckpt_runtime.scheduler.job_status import JobState
from ckpt_runtime.scheduler.restart_strategies import RestartHistory, Restarts
from tests.simulation.planted.registry import also, bug, nothing
from tests.simulation.protocols import configurations, record

# --- order


bug("what the machines say to each other overtakes itself", "run to completion", JobCore, "_tell", seed=23)(
    lambda self, event: self._queue.appendleft(partial(self._take, event))
)

bug("an effect is carried out before those in front of it", "run to completion", JobCore, "handle", seed=23)(
    lambda original, self, event, now: original(self, event, now)[::-1]
)


@bug("an end of data that comes early is forgotten", "6.2", JobCore, "_on_end_of_data", seed=229)
def _(original, self, event):
    if self.machine.state is not JobState.DEPLOYING:
        original(self, event)


bug("a subtask that waits for no checkpoint is not waited with", "147.3", ExecutionView, "_is_held_up", seed=4)(
    lambda self, key, known: False
)

bug("a checkpoint does not say that it is the last one", "147.7", Triggering, "_options", seed=139)(
    lambda original, self, *rest: replace(original(self, *rest), final=False)
)


# --- attempts


bug(
    "a recorded attempt is taken for the present one",
    "one attempt's answers are not another's",
    JobCore,
    "_on_attempt_recorded",
    seed=150,
)(lambda original, self, event: original(self, core.AttemptRecorded(self.machine.attempt)))


@bug("an attempt is deployed before it is recorded", "messages tell deployments apart by it", seed=1)
def _():
    def restore(self, effect):
        self._emit(core.RecordAttempt(effect.attempt))
        self._tell(core.AttemptRecorded(effect.attempt))

    original = JobCore.__init__

    def init(self, *arguments, **more):
        original(self, *arguments, **more)
        self._routes[job_core.job_out.RestoreState] = lambda effect: restore(self, effect)

    return [(JobCore, "__init__", init)]


@bug(
    "a new driver counts attempts from nothing", "messages tell deployments apart by it", JobMachine, "__init__", seed=1
)
def _(original, self, subtasks, restart_strategy, first_attempt=0, *more):
    original(self, subtasks, restart_strategy, 0, *more)


# --- settings


@bug("two changes of settings at the same time", "571.6", SettingsUpdate, "requested", seed=50)
def _(original, self, event, settings):
    self._change = None
    return original(self, event, settings)


@bug("a patch is applied that was not stored", "571.5", JobCore, "_on_overrides_answer", seed=114)
def _(original, self, event):
    if isinstance(event, core.ChangeNotStored) and self._update.concerns(event.request_id):
        before = self._update.overrides
        changed = self._update._change.stores.overrides
        self._update.overrides = before if changed is None else before.merged_with(changed)
        self._patch_coordinator()
        self._update.overrides = before
    original(self, event)


# --- replacements


@bug("a replaced graph is used before its deployment", "530, one plan is in force", seed=1)
def _():
    def extra(self, event):
        self.plan = self.accepted_plan

    return [also(JobCore, "_on_plan_stored", extra)]


bug("a replaced graph is not deployed", "530", JobCore, "_redeploy", seed=6)(nothing)


@bug(
    "the coordinator does not hear of a replaced graph", "530, one plan is in force", JobCore, "_to_coordinator", seed=6
)
def _(original, self, event):
    if not isinstance(event, checkpoint_on.GraphReplaced):
        original(self, event)


@bug(
    "a replaced graph is deployed with the old subtasks",
    "530, one plan is in force",
    JobMachine,
    "_on_redeploy",
    seed=6,
)
def _(original, self, event, now):
    original(self, job_on.RedeployRequested(self._subtasks), now)


@bug("slots are asked for by the graph that was replaced", "530, one plan is in force", seed=6)
def _():
    original = JobCore._on_attempt_recorded

    def recorded(self, event):
        # The plan takes effect, but not where the machine acquires slots.
        before, self.plan = self.plan, self.accepted_plan
        self._redeploy_is_due = False
        if self.plan.graph is not before.graph:
            self._to_coordinator(checkpoint_on.GraphReplaced(self.plan.graph))
        original(self, event)

    return [(JobCore, "_acquire_slots", JobCore._emit), (JobCore, "_on_attempt_recorded", recorded)]


@bug("a replaced configuration drops the overrides", "571.1", seed=11)
def _():
    def stored(self, event):
        self._to_coordinator(checkpoint_on.ConfigurationPatched(self.accepted_plan.settings))

    return [also(JobCore, "_on_plan_stored", stored)]


@bug("a replaced configuration waits for the next patch", "571.1", JobCore, "_on_plan_stored", seed=11)
def _(original, self, event):
    patch, self._patch_coordinator = self._patch_coordinator, lambda: None
    original(self, event)
    self._patch_coordinator = patch


bug("a configuration is replaced while settings are being changed", "571.6", SettingsUpdate, "is_busy", seed=57)(False)

bug("settings are changed while a configuration is replaced", "530.9, one lock", PlanChange, "configures", seed=1)(None)


@bug("a version that two requests get", "530.2", PlanChange, "_configure", seed=6)
def _(original, self, event, present, state):
    return original(self, replace(event, base=present), present, state)


@bug("a configuration is in force before it is stored", "530.5", JobCore, "_on_change_requested", seed=1)
def _(original, self, event):
    before = self._change.configures
    original(self, event)
    if self._change.configures is not before:
        self.accepted_plan = replace(self.accepted_plan, settings=event.plan.settings)
        self._patch_coordinator()


@bug("a restart for a configuration uses up the restart budget", "530.5", JobMachine, "_on_redeploy", seed=11)
def _(original, self, event, now):
    if self.state is JobState.RUNNING and event.at_once:
        self._restarts.on_failure(now.rel_ms)
    original(self, event, now)


bug("a restart for a configuration does not wait for a savepoint", "530.10", JobMachine, "_on_redeploy", seed=23)(
    lambda original, self, event, now: original(self, replace(event, at_once=True), now)
)

bug("a redeployment that waited for a savepoint is forgotten", "530.5", JobCore, "_savepoint_ended", seed=23)(
    lambda self, request_id: self._savepoint_requests.discard(request_id)
)


@bug("DELETE of overrides returns to the submitted configuration", "530.9", seed=11)
def _():
    original = JobCore._patch_coordinator

    def patch(self):
        self.__dict__.setdefault("submitted", self.plan.settings)
        original(self)
        if not self._update.overrides.given:
            self._to_coordinator(checkpoint_on.ConfigurationPatched(self.submitted))

    def stored(self, event):
        before, self._patch_coordinator = self._patch_coordinator, partial(patch, self)
        original_stored(self, event)
        self._patch_coordinator = before

    original_stored = JobCore._on_overrides_stored
    return [(JobCore, "_on_overrides_stored", stored)]


@bug(
    "a removed option comes back out of the job's stored options",
    "530.9, after a takeover",
    record,
    "with_plan",
    seed=1,
)
def _(original, job, graph, own):
    return original(job, graph, replace(own, given=Configuration.merge(Configuration(job.configuration), own.given)))


@bug("a removed option comes back out of the cluster's stored options", "530.9, after a takeover", seed=12)
def _():
    def cluster_options(job):
        return dict(job.properties.get("defaults") or job.properties["cluster_configuration"])

    return [(job_record, "cluster_options", cluster_options), (configurations, "cluster_options", cluster_options)]


@bug("a stored configuration drops what the system keeps beside it", "530.9", record, "with_plan", seed=1)
def _(original, job, graph, own):
    return replace(original(job, graph, own), configuration=own.given.to_dict())


@bug("a configuration is stored without its graph", "530.9, both change together", PlanChange, "_begin", seed=23)
def _(original, self, event, plan, least_slots, *, at_once):
    outputs = original(self, event, plan, least_slots, at_once=at_once)
    return [replace(o, own=replace(o.own, version=1)) if isinstance(o, core.StorePlan) else o for o in outputs]


bug(
    "bounds of a parallelism are forgotten when nothing else changes",
    "203.14",
    durable_change,
    "declared_bounds",
    seed=15,
)(lambda graph: {})


@bug(
    "a replaced restart strategy begins with an empty history",
    "530.6",
    JobMachine,
    "_on_restart_strategy_replaced",
    seed=23,
)
def _(self, event, now):
    self._restarts = Restarts(event.strategy)


@bug(
    "a replaced restart strategy forgets the restarts so far",
    "530.6",
    JobMachine,
    "_on_restart_strategy_replaced",
    seed=23,
)
def _(self, event, now):
    history = self._restarts._history
    self._restarts = Restarts(event.strategy)
    self._restarts._history = RestartHistory(0, history.failures, history.restart_at)


bug("a restart strategy cannot be replaced", "530.6", JobMachine, "_on_restart_strategy_replaced", seed=22)(nothing)


# --- rescales


bug(
    "a job is rescaled to whatever is asked for",
    "203.14, what does not fit is refused",
    durable_change,
    "check_bounds",
    seed=1,
)(nothing)

bug(
    "a job is rescaled while it is being stopped",
    "203.14, a stop goes first",
    durable_change,
    "check_replaceable",
    seed=9,
)(nothing)


@bug("two rescales at the same time", "203.14", PlanChange, "requested", seed=21)
def _(original, self, event, present, state):
    self._change = None
    return original(self, event, present, state)


@bug(
    "a rescale does not wait for its checkpoint",
    "203.14, a fresh checkpoint first",
    JobCore,
    "_on_slots_reserved",
    seed=6,
)
def _(original, self, event):
    original(self, event)
    if self._change.needs_running_job and self._change.concerns(event.request_id):
        self._follow(self._change.checkpoint_taken())


@bug("a rescale does not wait for its slots", "203.14, slots first", PlanChange, "requested", seed=6)
def _(original, self, event, present, state):
    outputs = original(self, event, present, state)
    if self.needs_running_job and self.concerns(event.request_id):
        return self.checkpoint_taken()
    return outputs


bug("a rescale continues when its slots are lost", "203.14, slots first", JobCore, "_on_slots_not_reserved", seed=11)(
    nothing
)

bug(
    "a rescale continues when its job fails",
    "203.14, a fresh checkpoint first",
    PlanChange,
    "needs_running_job",
    seed=11,
)(property(lambda self: False))


@bug("a rescale that is given up keeps its slots", "203.14, what is not needed is given back", seed=11)
def _():
    original = PlanChange._end

    def end(self, outcome, message=""):
        return [output for output in original(self, outcome, message) if not isinstance(output, core.ReleaseReserve)]

    def stored(self):
        return end(self, core.ChangeOutcome.APPLIED)

    return [(PlanChange, "_end", end), (PlanChange, "stored", stored)]


@bug(
    "a rescale that is given up is in force all the same",
    "203.14, the job continues as it was",
    JobCore,
    "_give_up_change",
    seed=11,
)
def _(original, self, reason):
    self.accepted_plan = replace(self.accepted_plan, graph=self.target_graph)
    original(self, reason)


@bug(
    "half of a rescale is stored",
    "203.14, a later driver runs the old or the new",
    PlanChange,
    "checkpoint_taken",
    seed=93,
)
def _(original, self):
    (order,) = original(self)
    graph = order.graph
    half = {vertex.id: 1 for vertex in graph.vertices[1:]}
    return [replace(order, graph=graph.with_parallelism(half))]


bug("a rescale whose storing is unknown counts as not stored", "203.14, K13", DurableChange, "failed", seed=70)(
    lambda self, *, unknown, final=False: Next.GIVE_UP
)


@bug("a rescale is in force before it is stored", "203.14, persist, then apply", JobCore, "_checkpoint_taken", seed=213)
def _(original, self):
    original(self)
    if self._change.plan is not None:
        self.accepted_plan = self._change.plan
        self._redeploy()


# --- the end


bug("the end is reported before it is stored", "K13", job_core, "_TELLS_OF_THE_END")(())

bug("a result that could not be stored is not stored again", "K13", JobCore, "_on_result_not_stored")(nothing)
