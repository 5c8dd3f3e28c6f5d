"""FLIP-571 in the coordinator, and the rhythm of the periodic trigger."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointConfigurationError
from ckpt_runtime.checkpoint.properties import CheckpointFailureReason as Reason
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.statistics import CheckpointMetrics
from ckpt_runtime.graph.job_graph import JobGraph
from tests.support.driven import later
from tests.unit.runtime.checkpoint.checkpoint_driver import START_REL, Driver, vertex

PERIODIC, CANCELLER = on.TimerKind.PERIODIC, on.TimerKind.CANCELLER
MINUTE = 60_000


def patch(driver: Driver, after_ms: int = 0, **changes: object) -> list[out.Effect]:
    configuration = replace(driver.coordinator.configuration, **changes)
    return driver.step(on.ConfigurationPatched(configuration), after_ms)


@pytest.mark.row("571.3")
class TestTimeout:
    def test_the_example_of_the_design(self):
        """95 % done at ten minutes, extended to fifteen, completes at ten minutes and two seconds."""
        driver = Driver(timeout_ms=10 * MINUTE).run()
        driver.trigger()
        for execution in driver.executions[:-1]:
            driver.ack(1, execution)
        old = driver.timer(CANCELLER)
        patch(driver, after_ms=10 * MINUTE - 10_000, timeout_ms=15 * MINUTE)
        new = driver.one(out.ScheduleTimer)
        assert new.at_rel_ms - driver.now.rel_ms == 5 * MINUTE + 10_000
        assert driver.step(on.TimerFired(old.timer, old.generation), after_ms=10_000) == []
        driver.ack(1, driver.executions[-1], after_ms=2_000)
        driver.publish(1)
        assert driver.coordinator.latest_checkpoint.id == 1
        assert not any(isinstance(effect, out.DiscardLocation) for effect in driver.trace)

    def test_a_shorter_one_that_is_past_expires_at_once_and_counts(self):
        driver = Driver(timeout_ms=10_000).run()
        driver.trigger()
        patch(driver, after_ms=5_000, timeout_ms=5_000)
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED
        assert driver.of(out.FailJob)

    def test_a_shorter_one_moves_the_deadline(self):
        driver = Driver(timeout_ms=10_000).run()
        driver.trigger()
        started = driver.now.rel_ms
        patch(driver, after_ms=1_000, timeout_ms=5_000)
        assert driver.one(out.ScheduleTimer).at_rel_ms == started + 5_000
        stats = driver.coordinator.statistics().checkpoint(1)
        assert stats.deadline_timestamp == stats.trigger_timestamp + 5_000

    def test_an_old_canceller_never_wins_against_an_extension(self):
        driver = Driver(timeout_ms=100).run()
        driver.trigger()
        old = driver.timer(CANCELLER)
        patch(driver, after_ms=99, timeout_ms=200)
        driver.step(on.TimerFired(old.timer, old.generation), after_ms=50)
        assert driver.last == []
        assert driver.coordinator.pending_ids == (1,)

    def test_canceller_of_an_ended_checkpoint_and_an_equal_timeout_change_nothing(self):
        driver = Driver(timeout_ms=100).run()
        driver.complete()
        timer = driver.timer(CANCELLER)
        assert driver.fire(timer) == []
        driver = Driver(timeout_ms=100).run()
        driver.trigger()
        assert patch(driver, timeout_ms=100) == []

    def test_new_timeout_applies_to_several_pending_checkpoints(self):
        driver = Driver(timeout_ms=1_000, max_concurrent=2, tolerable_failed_checkpoints=9).run()
        driver.trigger("old")
        driver.now = later(driver.now, 400)
        driver.trigger("young")
        patch(driver, after_ms=100, timeout_ms=450)
        assert driver.one(out.RequestFailed).request_id == "old"
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 400 + 450


@pytest.mark.row("571.9")
class TestRescue:
    """The policy that does by itself what a person does with a PATCH."""

    def nearly_done(self, **settings: object) -> Driver:
        """19 of 20 subtasks have acknowledged."""
        graph = JobGraph("job", (vertex("source", 20, kind="source"),), ())
        given = {"timeout_ms": 10 * MINUTE, "rescue_enabled": True, "tolerable_failed_checkpoints": 9}
        driver = Driver(graph, **given | settings).run()
        driver.trigger()
        for execution in driver.executions[:19]:
            driver.ack(1, execution)
        return driver

    def persisted(self, driver: Driver, size: int) -> None:
        metrics = CheckpointMetrics(checkpointed_size=size)
        driver.step(on.ProgressReported(1, driver.executions[-1], metrics))

    def test_the_example_of_the_design_without_a_person(self):
        """95 % done at ten minutes; completes two seconds later with all that was written for it."""
        driver = self.nearly_done()
        driver.fire(driver.timer(CANCELLER))
        assert driver.one(out.ScheduleTimer).at_rel_ms == driver.now.rel_ms + MINUTE
        pending = driver.coordinator.statistics().checkpoint(1)
        assert pending.deadline_timestamp == pending.trigger_timestamp + 11 * MINUTE
        driver.ack(1, driver.executions[-1], after_ms=2_000)
        driver.publish(1)
        assert driver.coordinator.latest_checkpoint.id == 1
        assert not any(isinstance(effect, out.DiscardLocation) for effect in driver.trace)
        done = driver.coordinator.statistics().checkpoint(1)
        assert (done.timeout_extension, done.deadline_timestamp) == (MINUTE, None)

    def test_rescue_is_off_by_default(self):
        driver = self.nearly_done(rescue_enabled=CheckpointConfiguration().rescue_enabled)
        driver.fire(driver.timer(CANCELLER))
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED

    @pytest.mark.parametrize(("least", "rescued"), [(95, True), (96, False)])
    def test_checkpoint_with_too_few_acknowledgements_expires(self, least: int, rescued: bool):
        driver = self.nearly_done(rescue_min_progress=least)
        driver.fire(driver.timer(CANCELLER))
        assert bool(driver.of(out.ScheduleTimer)) is rescued
        assert bool(driver.of(out.RequestFailed)) is not rescued

    def test_rescued_checkpoint_without_progress_gets_one_extension(self):
        driver = self.nearly_done()
        driver.fire(driver.timer(CANCELLER))
        driver.fire(driver.timer(CANCELLER))
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED
        assert driver.coordinator.statistics().checkpoint(1).timeout_extension == MINUTE

    def test_rescued_checkpoint_with_progress_gets_extensions_up_to_the_cap(self):
        driver = self.nearly_done(rescue_max_extension_ms=150_000)
        started = driver.now.rel_ms
        ends = []
        for size in (1, 2, 3):
            self.persisted(driver, size)
            driver.fire(driver.timer(CANCELLER))
            ends.append(driver.one(out.ScheduleTimer).at_rel_ms - started - 10 * MINUTE)
        assert ends == [MINUTE, 2 * MINUTE, 150_000]
        self.persisted(driver, 4)
        driver.fire(driver.timer(CANCELLER))
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED
        assert driver.coordinator.statistics().checkpoint(1).timeout_extension == 150_000

    def test_a_timer_that_comes_after_the_cap_rescues_nothing(self):
        driver = self.nearly_done()
        timer = driver.timer(CANCELLER)
        driver.step(on.TimerFired(timer.timer, timer.generation), after_ms=21 * MINUTE)
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED

    def test_patched_timeout_takes_precedence_over_the_rescue(self):
        """A shorter timeout that is past ends it at once; a longer one counts from the start, as before."""
        driver = self.nearly_done()
        driver.fire(driver.timer(CANCELLER))
        patch(driver, timeout_ms=15 * MINUTE)
        assert driver.one(out.ScheduleTimer).at_rel_ms == driver.now.rel_ms + 5 * MINUTE
        patch(driver, timeout_ms=5 * MINUTE)
        assert driver.one(out.RequestFailed).reason is Reason.CHECKPOINT_EXPIRED


@pytest.mark.row("571.4")
class TestInterval:
    def ticking(self, **settings: int) -> Driver:
        """A driver just after its first tick and that checkpoint's completion, 100 ms later."""
        driver = Driver(**{"interval_ms": 1_000, **settings}).run()
        driver.fire(driver.timer(PERIODIC))
        number = driver.one(out.InitializeLocation).checkpoint_id
        driver.locate(number)
        driver.now = later(driver.now, 100)
        driver.ack_all(number)
        driver.publish(number)
        return driver

    def test_fixed_rate(self):
        driver = self.ticking()
        first = START_REL + 1_000
        assert driver.timer(PERIODIC).at_rel_ms == first + 1_000
        driver.now = later(driver.now, 930)  # 30 ms late
        timer = driver.timer(PERIODIC)
        driver.step(on.TimerFired(timer.timer, timer.generation))
        assert driver.timer(PERIODIC).at_rel_ms == first + 2_000

    @pytest.mark.parametrize(
        ("pause_ms", "after_ms", "interval_ms", "due_ms"),
        [(0, 0, 500, 1_500), (0, 500, 100, 1_600), (800, 0, 810, 1_900), (800, 0, 10, 1_900)],
    )
    def test_shorter_interval_fires_sooner_or_now_and_not_before_the_pause(
        self, pause_ms, after_ms, interval_ms, due_ms
    ):
        driver = self.ticking(min_pause_ms=pause_ms)
        patch(driver, after_ms=after_ms, interval_ms=interval_ms)
        assert driver.one(out.ScheduleTimer).at_rel_ms == max(START_REL + due_ms, driver.now.rel_ms)
        assert driver.coordinator.configuration.interval_ms == max(interval_ms, pause_ms)

    def test_longer_postpones(self):
        driver = self.ticking()
        old = driver.timer(PERIODIC)
        patch(driver, interval_ms=3_000)
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 4_000
        assert driver.step(on.TimerFired(old.timer, old.generation), after_ms=900) == []

    def test_off_to_on_and_off_again(self):
        driver = Driver().run()
        assert driver.last == []
        patch(driver, after_ms=50, interval_ms=1_000)
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 1_000
        patch(driver, interval_ms=None)
        assert driver.last == [out.CancelTimer(on.TimerId(PERIODIC))]

    def test_interval_can_change_before_the_first_periodic_trigger(self):
        driver = Driver(interval_ms=1_000, first_delay_ms=600).run()
        assert driver.timer(PERIODIC).at_rel_ms == START_REL + 600
        assert patch(driver, interval_ms=5_000) == []
        patch(driver, interval_ms=300)
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 300

    def test_a_lower_limit_of_concurrency_and_a_higher_one(self):
        driver = Driver().run()
        driver.trigger("first")
        driver.step(on.TriggerRequested("second", CheckpointProperties()))
        patch(driver, max_concurrent=2)
        assert driver.one(out.InitializeLocation).checkpoint_id == 2

    def test_tolerable_failures(self):
        driver = Driver().run()
        patch(driver, tolerable_failed_checkpoints=1)
        driver.trigger()
        driver.step(on.Declined(1, driver.executions[0], Reason.CHECKPOINT_DECLINED))
        assert driver.of(out.FailJob) == []

    def test_backlog_rules_while_it_lasts(self):
        driver = self.ticking(interval_during_backlog_ms=5_000)
        driver.step(on.BacklogChanged(processing_backlog=True))
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 6_000
        assert patch(driver, interval_ms=2_000) == []
        driver.step(on.BacklogChanged(processing_backlog=False))
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 3_000
        assert driver.step(on.BacklogChanged(processing_backlog=False)) == []

    def test_checkpoint_that_a_source_wants_waits_for_none_that_is_pending(self):
        driver = Driver().run()
        driver.step(on.CheckpointWanted())
        assert driver.one(out.InitializeLocation).checkpoint_id == 1
        assert driver.step(on.CheckpointWanted()) == []
        driver.locate(1)
        assert driver.step(on.CheckpointWanted()) == []
        driver.ack_all(1)
        driver.publish(1)
        driver.step(on.CheckpointWanted())
        assert driver.one(out.InitializeLocation).checkpoint_id == 2
        driver.step(on.TasksLeftRunning())
        assert driver.step(on.CheckpointWanted()) == []

    def test_interval_of_zero_during_backlog_stops_periodic_checkpoints(self):
        driver = self.ticking(interval_during_backlog_ms=0)
        driver.step(on.BacklogChanged(processing_backlog=True))
        assert driver.last == [out.CancelTimer(on.TimerId(PERIODIC))]


class TestPeriodicTrigger:
    def test_ticks_are_coalesced(self):
        driver = Driver(interval_ms=100).run()
        driver.fire(driver.timer(PERIODIC))
        driver.locate(1)
        for _ in range(5):
            driver.fire(driver.timer(PERIODIC))
        driver.ack_all(1)
        driver.publish(1)
        assert driver.one(out.InitializeLocation).checkpoint_id == 2
        driver.locate(2)
        driver.ack_all(2)
        driver.publish(2)
        assert driver.of(out.InitializeLocation) == []

    def test_a_tick_within_the_pause_moves_to_its_end(self):
        driver = Driver(interval_ms=100, min_pause_ms=100, timeout_ms=1_000).run()
        driver.fire(driver.timer(PERIODIC))
        driver.locate(1)
        driver.now = later(driver.now, 90)
        driver.ack_all(1)
        driver.publish(1)
        completed = driver.now.rel_ms
        driver.fire(driver.timer(PERIODIC))
        assert driver.of(out.InitializeLocation) == []
        assert driver.timer(PERIODIC).at_rel_ms == completed + 100
        driver.fire(driver.timer(PERIODIC))
        assert driver.one(out.InitializeLocation).checkpoint_id == 2

    def test_a_user_ignores_the_pause(self):
        driver = Driver(interval_ms=100, min_pause_ms=100).run()
        driver.complete("a")
        assert driver.request("b") == 2

    def test_later_starts_begin_after_the_pause(self):
        driver = Driver(interval_ms=1_000, min_pause_ms=20, first_delay_ms=700).run()
        driver.steps(on.TasksLeftRunning(), on.RestoreRequested("x"))
        driver.run()
        assert driver.one(out.ScheduleTimer).at_rel_ms == START_REL + 20

    @pytest.mark.row("147.5")
    def test_stop_and_start_of_the_trigger_leave_one_tick_alive(self):
        driver = Driver(interval_ms=1_000).run()
        old = driver.timer(PERIODIC)
        driver.step(on.PeriodicTriggerStopped())
        driver.step(on.PeriodicTriggerStarted(), after_ms=10)
        assert driver.step(on.TimerFired(old.timer, old.generation), after_ms=990) == []
        assert driver.step(on.PeriodicTriggerStarted()) == []

    def test_an_early_timer_is_set_again(self):
        driver = Driver(interval_ms=1_000).run()
        timer = driver.timer(PERIODIC)
        assert driver.step(on.TimerFired(timer.timer, timer.generation)) == [timer]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"interval_ms": 9}, "interval_ms is 9"),
        ({"timeout_ms": 0}, "timeout_ms is 0"),
        ({"max_concurrent": 0}, "max_concurrent is 0"),
        ({"retained": 0}, "retained is 0"),
        ({"aligned_timeout_ms": -1}, "aligned_timeout_ms is -1"),
        ({"max_inflight_data_bytes": -1}, "max_inflight_data_bytes is -1"),
    ],
)
def test_limits_are_those_of_a_submission(changes, named):
    with pytest.raises(CheckpointConfigurationError, match=named):
        CheckpointConfiguration(**changes)
