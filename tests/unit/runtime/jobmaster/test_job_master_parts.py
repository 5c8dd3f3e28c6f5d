"""The small parts of a job master: failures, restart strategies, checkpoint settings, executions."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
import pytest

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration, CheckpointOverrides, CheckpointRetention
from ckpt_runtime.configuration.checkpointing_options import CHECKPOINT_SETTINGS, PATCHABLE, CheckpointingOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import Changeability, InvalidOptionError
from ckpt_runtime.configuration.pipeline_options import RestartStrategyType
from ckpt_runtime.contract.configuration import Externalization
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.jobmaster import executions as executions_module
from ckpt_runtime.jobmaster.executions import ExecutionGraph, limited
from ckpt_runtime.jobmaster.gateway_values import NOT_YET, EffectiveCheckpointConfig, ExceptionEntry, ExecutionState
from ckpt_runtime.jobmaster.job_settings import (
    create_restart_strategy,
    processes_backlog,
    strategy_type,
    submitted_settings,
    with_implicit_strategy,
)
from ckpt_runtime.jobmaster.job_view import MAX_CONCURRENT, FailureLog
from ckpt_runtime.network.control_messages import SubtaskMeasures
from ckpt_runtime.rest.handlers.configuration import shown_settings as answer
from ckpt_runtime.scheduler.restart_strategies import ExponentialDelay, FailureRate, FixedDelay, NoRestart


def failure(name: str) -> ExceptionEntry:
    return ExceptionEntry(FailureCause("E", name, ""), 0)


def effective(settings: CheckpointConfiguration) -> EffectiveCheckpointConfig:
    return EffectiveCheckpointConfig(settings, settings.exactly_once, "HashMapStateBackend", "")


class TestFailureLog:
    def test_newest_failure_is_first_and_the_oldest_is_dropped(self) -> None:
        log = FailureLog(2)
        for name in "abc":
            log.add(failure(name), concurrent=False)
        view = log.view(10)
        assert [entry.failure.message for entry in view.entries] == ["c", "b"]
        assert view.truncated

    def test_a_limit_shortens_the_view_and_says_so(self) -> None:
        log = FailureLog(5)
        log.add(failure("a"), concurrent=False)
        assert not log.view(1).truncated
        log.add(failure("b"), concurrent=False)
        assert log.view(1).truncated
        assert len(log.view(1).entries) == 1

    def test_failures_that_come_along_belong_to_the_first(self) -> None:
        log = FailureLog(5)
        log.add(failure("alone"), concurrent=True)
        for index in range(MAX_CONCURRENT + 3):
            log.add(failure(str(index)), concurrent=True)
        (entry,) = log.view(5).entries
        assert entry.failure.message == "alone"
        assert [other.failure.message for other in entry.concurrent] == [str(i) for i in range(MAX_CONCURRENT)]


class TestRestartStrategy:
    @pytest.mark.parametrize(
        ("options", "kind"),
        [
            ({}, NoRestart),
            ({"execution.checkpointing.interval": "1 s"}, ExponentialDelay),
            ({"execution.checkpointing.interval": "1 s", "restart-strategy.type": "none"}, NoRestart),
            ({"restart-strategy.type": "fixed-delay"}, FixedDelay),
            ({"restart-strategy.type": "failure-rate"}, FailureRate),
            ({"restart-strategy.type": "exponential-delay"}, ExponentialDelay),
        ],
    )
    def test_the_options_choose(self, options: dict[str, str], kind: type[Any]) -> None:
        assert isinstance(create_restart_strategy(Configuration(options)), kind)

    def test_the_default_depends_on_periodic_checkpoints(self) -> None:
        assert strategy_type(Configuration({})) is RestartStrategyType.NONE

    @pytest.mark.row("530.6")
    @pytest.mark.parametrize("interval", ["1 s", None])
    def test_restart_strategy_of_the_submission_stays_when_an_interval_is_set_or_removed(
        self, interval: str | None
    ) -> None:
        with_interval = Configuration({"execution.checkpointing.interval": "1 s"})
        at_submission, later = (with_interval, Configuration()) if interval else (Configuration(), with_interval)
        kept = with_implicit_strategy(Configuration({"a": "b"}), at_submission)
        assert kept["a"] == "b"
        expected = RestartStrategyType.EXPONENTIAL_DELAY if interval else RestartStrategyType.NONE
        assert strategy_type(Configuration.merge(kept, later)) is expected
        named = Configuration({"restart-strategy.type": "failure-rate"})
        assert strategy_type(Configuration.merge(kept, later, named)) is RestartStrategyType.FAILURE_RATE

    def test_an_unknown_strategy_is_refused_by_name(self) -> None:
        with pytest.raises(InvalidOptionError, match=r"restart-strategy\.type.*sometimes"):
            create_restart_strategy(Configuration({"restart-strategy.type": "sometimes"}))


class TestCheckpointSettings:
    def test_options_become_settings(self) -> None:
        settings = submitted_settings(
            Configuration(
                {
                    "execution.checkpointing.interval": "2 s",
                    "execution.checkpointing.timeout": "30 s",
                    "execution.checkpointing.min-pause": "500 ms",
                    "execution.checkpointing.tolerable-failed-checkpoints": "3",
                    "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
                }
            )
        )
        assert (settings.interval_ms, settings.timeout_ms, settings.min_pause_ms) == (2_000, 30_000, 500)
        assert settings.tolerable_failed_checkpoints == 3
        assert settings.retention is CheckpointRetention.RETAIN_ON_CANCELLATION

    def test_job_without_an_interval_has_no_periodic_checkpoints(self) -> None:
        assert submitted_settings(Configuration({})).interval_ms is None

    def test_every_option_of_the_table_is_read_and_shown(self) -> None:
        """``checkpoints_after_tasks_finish`` was shown as true whatever the job said."""
        texts = {
            CheckpointingOptions.UNALIGNED.key: "true",
            CheckpointingOptions.INCREMENTAL.key: "true",
            CheckpointingOptions.RESCUE_ENABLED.key: "true",
            CheckpointingOptions.RESCUE_MIN_PROGRESS.key: "43",
            CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH.key: "false",
            CheckpointingOptions.EXTERNALIZED_RETENTION.key: "NO_EXTERNALIZED_CHECKPOINTS",
        }
        keys = [item.option.key for item in CHECKPOINT_SETTINGS]
        configuration = Configuration(dict.fromkeys(keys, "4321") | texts)
        defaults = submitted_settings(Configuration({}))
        settings = submitted_settings(configuration)
        shown = answer(effective(settings))
        names = {"unaligned_enabled": "unaligned"}
        compared = 0
        for item in CHECKPOINT_SETTINGS:
            value = getattr(settings, item.field)
            assert value == configuration.get(item.option) != getattr(defaults, item.field) == item.option.default
            name = names.get(item.field, item.field)
            if hasattr(shown, name):
                compared += 1
                assert getattr(shown, name) == value
        assert compared == 9
        assert shown.checkpoints_after_tasks_finish is False

    def test_backlog_begins_at_the_limit_and_ends_at_half_of_it(self) -> None:
        configuration = Configuration({"execution.checkpointing.backlog.pending-records": "100"})
        found, backlog = [], False
        for pending in (99, 100, 60, 51, 50, 99, 101, 0):
            backlog = processes_backlog(pending, backlog, configuration)
            found.append(backlog)
        assert found == [False, True, True, True, False, False, True, False]

    def test_settings_table_is_complete_and_only_live_settings_can_be_overridden(self) -> None:
        fields = {item.name for item in dataclasses.fields(CheckpointConfiguration)}
        assert fields == {item.field for item in CHECKPOINT_SETTINGS} | {"transaction_timeout_ms", "exactly_once"}
        live = {item.field for item in CHECKPOINT_SETTINGS if item.option.changeability is Changeability.LIVE}
        assert live == {item.field for item in PATCHABLE.values()} | {"retained", "retention"}
        assert not CheckpointOverrides(timeout_ms=None).given
        with pytest.raises(TypeError, match="retained"):
            CheckpointOverrides(retained=3)

    @pytest.mark.parametrize(
        ("retention", "externalized", "deleted"),
        [
            ("RETAIN_ON_CANCELLATION", True, False),
            ("DELETE_ON_CANCELLATION", True, True),
            ("NO_EXTERNALIZED_CHECKPOINTS", False, True),
        ],
    )
    def test_retention_is_shown_as_flink_does(self, retention: str, externalized: bool, deleted: bool) -> None:
        configuration = Configuration({"execution.checkpointing.externalized-checkpoint-retention": retention})
        shown = answer(effective(submitted_settings(configuration)))
        assert shown.externalization == Externalization(externalized, deleted)


SOURCE = JobVertex("s", (OperatorNode("s", "Source", "source"),), 2)
SINK = JobVertex("k", (OperatorNode("k", "Sink", "sink"),), 1)
S0, S1, K0 = ("s", 0), ("s", 1), ("k", 0)
State = ExecutionState


class TestExecutions:
    @pytest.fixture
    def now(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        now = [1_000]
        monkeypatch.setattr(executions_module, "wall_clock_ms", lambda: now[0])
        return now

    @pytest.fixture
    def graph(self, now: list[int]) -> ExecutionGraph:
        return ExecutionGraph(JobGraph("j", (SOURCE, SINK), ()))

    @staticmethod
    def figures(
        rows: int, busy: float = 0.0, vertex: str = "s", buffers: int | None = None, at: float = 0.0, **more: Any
    ) -> SubtaskMeasures:
        return SubtaskMeasures(
            vertex, 0, rows_in=rows, rows_out=2 * rows, bytes_in=8 * rows, bytes_out=16 * rows,
            late_rows_dropped=rows // 100, busy_ms=busy, idle_ms=0.0, backpressured_ms=0.0,
            debloated_buffer_size=buffers, measured_ms=at, **more,
        )  # fmt: skip

    def test_final_states_stay_until_a_new_attempt_starts(self, graph: ExecutionGraph) -> None:
        graph.executions[S0].enter(State.FINISHED)
        graph.enter_all(State.CANCELING)
        assert graph.counts() == {State.FINISHED: 1, State.CANCELING: 2}
        assert graph.executions[S0].state is State.FINISHED
        graph.enter_all(State.RUNNING)
        graph.reset(3, graph.graph)
        assert {execution.state for execution in graph.executions.values()} == {State.CREATED}
        assert {execution.id.attempt for execution in graph.executions.values()} == {3}

    @pytest.mark.parametrize(
        ("states", "summed_up"),
        [
            ((State.RUNNING, State.RUNNING), State.RUNNING),
            ((State.RUNNING, State.FINISHED), State.RUNNING),
            ((State.FINISHED, State.FINISHED), State.FINISHED),
            ((State.INITIALIZING, State.RUNNING), State.INITIALIZING),
            ((State.CANCELED, State.FAILED), State.FAILED),
        ],
    )
    def test_a_vertex_is_summed_up(self, graph: ExecutionGraph, states: tuple[State, State], summed_up: State) -> None:
        for key, state in zip((S0, S1), states, strict=True):
            graph.executions[key].enter(state)
        assert graph.vertex_details(SOURCE).status is summed_up

    @pytest.mark.parametrize("state", list(State)[:-1])
    def test_every_state_can_be_summed_up(self, graph: ExecutionGraph, state: State) -> None:
        graph.enter_all(state)
        assert graph.vertex_details(SOURCE).status is state

    def test_times_run_from_the_first_start_to_the_last_end(self, graph: ExecutionGraph, now: list[int]) -> None:
        assert graph.vertex_details(SOURCE).start_time_ms == NOT_YET
        graph.executions[S1].enter(State.DEPLOYING)
        now[0] = 2_000
        graph.executions[S0].enter(State.DEPLOYING)
        graph.executions[S0].enter(State.FINISHED)
        details = graph.vertex_details(SOURCE)
        assert (details.start_time_ms, details.end_time_ms) == (1_000, NOT_YET)
        now[0] = 3_000
        graph.executions[S1].enter(State.FINISHED)
        assert graph.vertex_details(SOURCE).end_time_ms == 3_000

    def test_heartbeats_become_rates_by_the_clock_of_the_worker(self, graph: ExecutionGraph, now: list[int]) -> None:
        graph.measured([self.figures(100, busy=10), self.figures(1, vertex="unknown")])
        assert graph.vertex_metrics(SOURCE)[0]["numRecordsInPerSecond"] == 0
        assert graph.pressure(SOURCE).subtasks == ()
        now[0] += 700
        graph.measured([self.figures(200, busy=260, at=500)])
        metrics = graph.vertex_metrics(SOURCE)
        assert list(metrics) == [0]
        assert metrics[0]["numRecordsIn"] == 200
        assert metrics[0]["numLateRecordsDropped"] == 2
        assert metrics[0]["numRecordsInPerSecond"] == 200
        assert metrics[0]["numRecordsOutPerSecond"] == 400
        assert metrics[0]["busyTimeMsPerSecond"] == 500
        assert metrics[0]["accumulateBusyTimeMs"] == 260
        assert "debloatedBufferSize" not in metrics[0]
        assert metrics[0]["numBytesInPerSecond"] == 1600
        assert metrics[0]["numBytesOut"] == 3200
        assert metrics[0]["numBytesOutPerSecond"] == 3200
        (pressure,) = graph.pressure(SOURCE).subtasks
        assert (pressure.index, pressure.busy) == (0, 0.5)
        first, second = graph.vertex_details(SOURCE).subtasks
        assert first.measures is not None
        assert (first.measures.rows_in, first.measures.rows_out) == (200, 400)
        assert (first.measures.bytes_in, first.measures.bytes_out) == (1600, 3200)
        assert second.measures is None

    def test_metrics_show_the_adapted_size_of_buffers_and_figures_of_state_backends(
        self, graph: ExecutionGraph
    ) -> None:
        graph.measured([self.figures(200, buffers=4_096)])
        assert graph.vertex_metrics(SOURCE)[0]["debloatedBufferSize"] == 4_096
        graph.measured([self.figures(200)])
        assert "debloatedBufferSize" not in graph.vertex_metrics(SOURCE)[0]
        name = "count.rocksdb.estimate-num-keys"
        graph.measured([msgspec.structs.replace(self.figures(200), state={name: 7})])
        assert graph.vertex_metrics(SOURCE)[0][name] == 7

    def test_series_above_the_limit_are_left_out_operators_first_and_counted(self, graph: ExecutionGraph) -> None:
        rows = (5,) * len(SOURCE.operators)
        graph.measured([msgspec.structs.replace(self.figures(200), operator_rows=rows)])
        everything, none = limited(graph.series("j", "job"), 1_000)
        assert none == 0
        assert [one.of_operator for one in everything] == [False] + [True] * len(rows)
        of_task = len(everything[0].values)
        kept, left_out = limited(graph.series("j", "job"), of_task)
        assert (kept, left_out) == (everything[:1], sum(len(one.values) for one in everything[1:]))
        assert limited(graph.series("j", "job"), of_task - 1)[0] == ()

    def test_figures_of_another_number_of_operators_give_no_operator_metrics(self, graph: ExecutionGraph) -> None:
        graph.measured([msgspec.structs.replace(self.figures(200), operator_rows=(1,) * 99)])
        assert [one.of_operator for one in graph.series("j", "job")] == [False]

    def test_a_subtask_is_stalled_while_work_waits_and_no_row_moves(self, graph: ExecutionGraph) -> None:
        def stalled(**figures: Any) -> tuple[float, float]:
            graph.measured([self.figures(**figures)])
            details = graph.vertex_details(SOURCE).subtasks[0]
            return details.still_ms, details.stalled_ms

        assert stalled(rows=7, at=1_000, work_waits=True) == (0, 0)
        assert stalled(rows=7, at=2_000, work_waits=True) == (1_000, 1_000)
        assert stalled(rows=7, at=3_500, work_waits=True) == (2_500, 2_500)
        assert stalled(rows=7, at=4_000, work_waits=False) == (3_000, 0)
        assert stalled(rows=7, at=5_000, work_waits=True) == (4_000, 1_000)
        assert stalled(rows=7, at=6_000, work_waits=True, slices=1) == (0, 0)
        assert stalled(rows=8, at=7_000, work_waits=True, slices=1) == (0, 0)

    def test_two_heartbeats_in_one_millisecond_are_no_division_by_zero(self, graph: ExecutionGraph) -> None:
        graph.measured([self.figures(1)])
        graph.measured([self.figures(2)])
        assert graph.vertex_metrics(SOURCE)[0]["numRecordsInPerSecond"] == 0
        assert graph.pressure(SOURCE).subtasks == ()
