"""Buffer debloating: adapts the size of the buffers in flight to a subtask to its throughput (FLIP-183).

Credit and queue lengths fix the number of buffers in flight; their size determines how long processing them takes. At
a size of throughput x target / number of buffers, the subtask needs about the target time for all buffers in flight,
and a barrier after them waits about that long.
Source: Flink's BufferDebloater.
"""

from __future__ import annotations

from collections.abc import Sequence

from ckpt_runtime.configuration.cluster_options import TaskManagerOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.network.gate import InputChannel
from ckpt_runtime.task.metrics import SubtaskMetrics

MIN_BUFFER_BYTES = 256
"""Smaller buffers would consist mostly of overhead."""

_CONVERGED = 10
"""After this many times the number of smoothed samples, further equal samples change nothing."""


class BufferDebloater:
    """The size of buffers for one subtask, in bytes, between :data:`MIN_BUFFER_BYTES` and ``max_bytes``.

    ``buffers`` is how many may be in flight to the subtask. A sample has the weight ``2 / (samples + 1)``, the previous
    value the rest. Senders are notified of a size that differs from the last notified one by ``threshold_percentages``
    or more, or that has reached a bound.
    """

    def __init__(
        self, *, target_ms: int, period_ms: int, samples: int, threshold_percentages: int, buffers: int, max_bytes: int
    ) -> None:
        if buffers < 1:
            raise ValueError(f"the number of buffers in flight must be at least 1, was {buffers}")
        self._target_ms = target_ms
        self._period_ms = period_ms
        self._weight = 2 / (samples + 1)
        self._most_periods = _CONVERGED * samples
        self._threshold = threshold_percentages / 100
        self._buffers = buffers
        self._min = min(MIN_BUFFER_BYTES, max_bytes)
        self._max = max_bytes
        self._smoothed = float(max_bytes)
        self.size = max_bytes

    def measured(self, processed_bytes: int, active_ms: float) -> int | None:
        """A new :attr:`size` after ``processed_bytes`` in ``active_ms``; None when it stays as it is.

        A subtask is active while it is not idle for lack of input; back-pressured time is included. Without active time
        no sample is taken; a sample over several periods counts that many times.
        """
        if active_ms <= 0:
            return None
        wanted = processed_bytes / active_ms * self._target_ms / self._buffers
        for _ in range(max(1, min(int(active_ms / self._period_ms), self._most_periods))):
            # Growth is limited like shrinking: one sample during a burst must not undo many samples of slow rows.
            wanted = max(self._min, min(wanted, 2 * self._smoothed))
            smoothed = self._smoothed + self._weight * (wanted - self._smoothed)
            self._smoothed = min(float(self._max), smoothed)
        size = round(self._smoothed)
        differs = abs(size - self.size) >= self._threshold * self.size
        if size == self.size or not (differs or size in (self._min, self._max)):
            return None
        self.size = size
        return size


class InputDebloating:
    """Called by the subtask's thread between two pieces of work. All inputs share one throughput and one size.

    ``taken_bytes`` grows with each buffer that the subtask takes, by the size of its rows as senders count it. The size
    on the network would mislead, because small buffers consist mostly of headers.
    """

    def __init__(self, debloater: BufferDebloater, channels: Sequence[InputChannel], period_ms: int) -> None:
        self._debloater = debloater
        self._channels = tuple(channels)
        self._period_ms = period_ms
        self._last: tuple[float, int, int, int] | None = None
        self.next_ms = 0.0
        self.taken_bytes = 0

    def measure(self, now_ms: float, metrics: SubtaskMetrics, *, rest_bytes: int, input_waits: bool) -> None:
        """Takes a sample. Call it when the monotonic clock has reached :attr:`next_ms`.

        ``rest_bytes`` of the current buffer have not been processed yet. While input waits, all time except idle time
        counts, because other subtasks on the thread also slow this one down. Otherwise only its own time counts.
        """
        processed = self.taken_bytes - rest_bytes
        spent = metrics.timer.closed
        own_ns = spent.busy + spent.backpressured
        # Differences of running totals, so that nothing is lost when a sample is skipped.
        last, self._last = self._last, (now_ms, processed, spent.idle, own_ns)
        self.next_ms = now_ms + self._period_ms
        if last is None:
            return
        last_ms, last_processed, last_idle_ns, last_own_ns = last
        if input_waits:
            active_ms = now_ms - last_ms - (spent.idle - last_idle_ns) / 1e6
        elif processed > last_processed:
            active_ms = (own_ns - last_own_ns) / 1e6
        else:
            return
        size = self._debloater.measured(processed - last_processed, active_ms)
        metrics.debloated_buffer_size = self._debloater.size
        if size is not None:
            for channel in self._channels:
                channel.buffer_size.announce(size)


def input_debloating(
    configuration: Configuration, channels: Sequence[InputChannel], local: Sequence[bool]
) -> InputDebloating | None:
    """The debloating of a subtask's input channels, ``local`` ones inside the worker; None if disabled or useless.

    A channel without overtaking carries ranges or committables, whose buffers cannot be made smaller.
    """
    get = configuration.get
    if not get(TaskManagerOptions.BUFFER_DEBLOAT_ENABLED):
        return None
    queued = get(TaskManagerOptions.MAX_BUFFERS_PER_OUTPUT_CHANNEL)
    granted = get(TaskManagerOptions.BUFFERS_PER_CHANNEL)
    buffers = {
        channel.index: queued if inside else queued + granted
        for channel, inside in zip(channels, local, strict=True)
        if channel.overtakes
    }
    if not buffers:
        return None
    period_ms = get(TaskManagerOptions.BUFFER_DEBLOAT_PERIOD)
    debloater = BufferDebloater(
        target_ms=get(TaskManagerOptions.BUFFER_DEBLOAT_TARGET),
        period_ms=period_ms,
        samples=get(TaskManagerOptions.BUFFER_DEBLOAT_SAMPLES),
        threshold_percentages=get(TaskManagerOptions.BUFFER_DEBLOAT_THRESHOLD_PERCENTAGES),
        buffers=sum(buffers.values()),
        max_bytes=get(TaskManagerOptions.BUFFER_BYTES),
    )
    return InputDebloating(debloater, [channel for channel in channels if channel.index in buffers], period_ms)
