"""Buffer debloating: the size of buffers for a throughput, and the measurement of a subtask's throughput."""

from __future__ import annotations

import pyarrow as pa
import pytest

from ckpt_runtime.configuration.cluster_options import TaskManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.elements import DesiredBufferSize
from ckpt_runtime.network.gate import InputChannel, InputGate
from ckpt_runtime.task.input_debloating import MIN_BUFFER_BYTES, BufferDebloater, input_debloating
from ckpt_runtime.task.metrics import Activity, SubtaskMetrics
from tests.unit.runtime.task.conftest import TaskKit


def debloater(
    *, target_ms: int = 1_000, samples: int = 1, threshold: int = 25, buffers: int = 10, max_bytes: int = 1 << 20
) -> BufferDebloater:
    return BufferDebloater(
        target_ms=target_ms,
        period_ms=200,
        samples=samples,
        threshold_percentages=threshold,
        buffers=buffers,
        max_bytes=max_bytes,
    )


def test_all_buffers_in_flight_together_hold_what_the_target_time_takes() -> None:
    """200 kB in 200 ms, ten buffers, one second: 100 kB each."""
    assert debloater().measured(200_000, 200) == 100_000
    assert debloater(target_ms=500).measured(200_000, 200) == 50_000
    assert debloater(buffers=40).measured(200_000, 200) == 25_000


def test_one_sample_without_smoothing_shrinks_buffers_at_once_and_growth_doubles() -> None:
    known = debloater()
    assert known.measured(2_000, 200) == 1_000
    assert [known.measured(200_000, 200) for _ in range(9)] == [
        2_000, 4_000, 8_000, 16_000, 32_000, 64_000, 100_000, None, None,
    ]  # fmt: skip


def test_size_of_buffers_stays_between_the_smallest_and_the_configured_one() -> None:
    assert debloater().measured(0, 200) == MIN_BUFFER_BYTES
    known = debloater()
    assert known.measured(1 << 30, 200) is None
    assert known.size == 1 << 20
    known = debloater(max_bytes=100)
    assert known.measured(0, 200) is None
    assert known.size == 100


def test_samples_smooth_a_burst_and_a_long_one_counts_as_all_its_periods() -> None:
    known = debloater(samples=19, threshold=0)
    assert known.measured(0, 200) == round((1 << 20) - 0.1 * ((1 << 20) - MIN_BUFFER_BYTES))
    one, many = debloater(samples=19, threshold=0), debloater(samples=19, threshold=0)
    one.measured(3_000, 3_000)
    for _ in range(15):
        many.measured(200, 200)
    assert one.size == many.size


def test_changes_below_the_threshold_are_kept_quiet_until_they_add_up() -> None:
    known = debloater()
    assert known.measured(200_000, 200) == 100_000
    assert known.measured(160_000, 200) is None
    assert known.measured(151_000, 200) is None
    assert known.measured(150_000, 200) == 75_000
    assert known.measured(187_400, 200) is None
    assert known.measured(187_600, 200) == 93_800


def test_bounds_of_the_buffer_size_are_reached_with_any_threshold() -> None:
    known = debloater(threshold=100, max_bytes=1_000)
    assert known.measured(2_000 * 9 // 10, 200) is None
    assert known.measured(0, 200) == MIN_BUFFER_BYTES
    assert known.measured(2_000_000, 200) == 2 * MIN_BUFFER_BYTES
    assert known.measured(2_000_000, 200) == 1_000


@pytest.mark.parametrize("active_ms", [0, -0.5])
def test_measurement_without_elapsed_time_is_ignored(active_ms: float) -> None:
    known = debloater()
    assert known.measured(0, active_ms) is None
    assert known.size == 1 << 20


def test_debloater_refuses_fewer_than_one_buffer() -> None:
    with pytest.raises(ValueError, match="at least 1, was 0"):
        debloater(buffers=0)


class TestDesiredBufferSize:
    def test_a_listener_receives_every_request(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.listen(heard.append)
        assert heard == []
        desired.announce(512)
        desired.announce(1_024)
        assert heard == [512, 1_024]

    def test_a_late_listener_hears_the_latest(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.announce(512)
        desired.announce(1_024)
        desired.listen(heard.append)
        assert heard == [1_024]

    def test_a_request_that_arrives_during_the_notification_of_an_older_one_wins(self) -> None:
        heard: list[int] = []
        desired = DesiredBufferSize()
        desired.announce(512)

        def slow(size: int) -> None:
            if size == 512:
                desired.announce(1_024)
            heard.append(size)

        desired.listen(slow)
        assert heard[-1] == 1_024


ROW_BYTES = 8
ON = {
    TaskManagerOptions.BUFFER_DEBLOAT_ENABLED.key: "true",
    TaskManagerOptions.BUFFER_DEBLOAT_SAMPLES.key: "1",
    TaskManagerOptions.BUFFER_DEBLOAT_THRESHOLD_PERCENTAGES.key: "0",
    TaskManagerOptions.BUFFERS_PER_CHANNEL.key: "4",
    TaskManagerOptions.MAX_BUFFERS_PER_OUTPUT_CHANNEL.key: "10",
}


def channels(number: int, *, overtakes: bool = True) -> list[InputChannel]:
    gate = InputGate(lambda: None)
    return [gate.add_channel(0, 4, overtakes=overtakes) for _ in range(number)]


def desired_sizes(of: list[InputChannel]) -> list[int | None]:
    return [channel.buffer_size.latest for channel in of]


def spend(metrics: SubtaskMetrics, activity: Activity, ms: int) -> None:
    metrics.timer.enter(activity, 0)
    metrics.timer.enter(None, ms * 1_000_000)


def test_debloating_is_off_by_default_and_where_nothing_can_adapt() -> None:
    assert input_debloating(Configuration({}), channels(2), [True, False]) is None
    assert input_debloating(Configuration(ON), [], []) is None
    assert input_debloating(Configuration(ON), channels(2, overtakes=False), [True, False]) is None


def test_local_channels_queue_and_remote_ones_queue_and_grant() -> None:
    """10 + (10 + 4) buffers; 240 kB a second take one second."""
    inputs = channels(2)
    debloating = input_debloating(Configuration(ON), inputs, [True, False])
    assert debloating is not None
    metrics = SubtaskMetrics()
    debloating.measure(0, metrics, rest_bytes=0, input_waits=True)
    assert desired_sizes(inputs) == [None, None]
    debloating.taken_bytes += 50_000
    debloating.measure(200, metrics, rest_bytes=2_000, input_waits=True)
    assert desired_sizes(inputs) == [10_000, 10_000]
    assert metrics.debloated_buffer_size == 10_000
    assert debloating.next_ms == 400
    debloating.taken_bytes += 46_000
    debloating.measure(400, metrics, rest_bytes=0, input_waits=True)
    assert desired_sizes(inputs) == [10_000, 10_000]


@pytest.mark.parametrize(
    ("waits", "busy_ms", "backpressured_ms", "idle_ms", "size"),
    [
        (True, 40, 0, 0, 5_000),  # the other 160 ms went to subtasks of the same thread
        (True, 40, 0, 160, 25_000),
        (False, 40, 0, 160, 25_000),
        (False, 40, 0, 0, 25_000),
        (False, 20, 20, 0, 25_000),
    ],
)
def test_idle_time_does_not_count(waits: bool, busy_ms: int, backpressured_ms: int, idle_ms: int, size: int) -> None:
    inputs = channels(1)
    debloating = input_debloating(Configuration(ON), inputs, [True])
    assert debloating is not None
    metrics = SubtaskMetrics()
    debloating.measure(0, metrics, rest_bytes=0, input_waits=True)
    spend(metrics, Activity.BUSY, busy_ms)
    spend(metrics, Activity.BACKPRESSURED, backpressured_ms)
    spend(metrics, Activity.IDLE, idle_ms)
    debloating.taken_bytes += 10_000
    debloating.measure(200, metrics, rest_bytes=0, input_waits=waits)
    assert desired_sizes(inputs) == [size]


def test_debloater_without_input_measures_nothing() -> None:
    inputs = channels(1)
    debloating = input_debloating(Configuration(ON), inputs, [True])
    assert debloating is not None
    metrics = SubtaskMetrics()
    debloating.measure(0, metrics, rest_bytes=0, input_waits=True)
    spend(metrics, Activity.BUSY, 1)
    debloating.measure(200, metrics, rest_bytes=0, input_waits=False)
    assert desired_sizes(inputs) == [None]


@pytest.mark.parametrize("remote", [False, True])
def test_a_buffer_of_slow_rows_counts_as_far_as_it_has_been_processed(kit: TaskKit, remote: bool) -> None:
    """One ms a row; 14 buffers of a channel. Bytes on the wire would be many more."""
    bench = kit.Bench().open()
    [channel] = bench.gate.channels
    bench.subtask.debloating = input_debloating(Configuration(ON), bench.gate.channels, [False])

    class Slow(type(bench.head)):  # type: ignore[misc]
        def process_batch(self, batch: pa.RecordBatch, input_index: int) -> None:
            bench.host.mono_ms += batch.num_rows

    bench.head.__class__ = Slow
    rows = kit.rows(*range(4_000))
    bench.put(0, kit.encoded(*range(4_000)) if remote else rows)
    while bench.subtask.step():
        if channel.buffer_size.latest is not None:
            break
    assert bench.subtask._work.rest.num_rows > 3_000
    assert channel.buffer_size.latest == pytest.approx(1_000 * ROW_BYTES / 14, abs=1)
    bench.run()
    assert channel.buffer_size.latest == pytest.approx(1_000 * ROW_BYTES / 14, abs=1)
