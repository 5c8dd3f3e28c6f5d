"""Whatever is measured: sizes stay within bounds, follow the throughput, and change only when it matters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.task.input_debloating import MIN_BUFFER_BYTES, BufferDebloater

PERIOD_MS = 200
DEBLOATERS = st.builds(
    BufferDebloater,
    target_ms=st.integers(1, 60_000),
    period_ms=st.just(PERIOD_MS),
    samples=st.integers(1, 50),
    threshold_percentages=st.integers(0, 100),
    buffers=st.integers(1, 10_000),
    max_bytes=st.integers(1 << 10, 1 << 30),
)
SAMPLES = st.lists(st.tuples(st.integers(0, 1 << 34), st.floats(0, 1e5)), max_size=50)


@given(DEBLOATERS, SAMPLES)
def test_sizes_stay_within_bounds_and_only_changes_are_reported(
    known: BufferDebloater, samples: list[tuple[int, float]]
) -> None:
    most = known.size
    for processed, active_ms in samples:
        before = known.size
        changed = known.measured(processed, active_ms)
        assert MIN_BUFFER_BYTES <= known.size <= most
        assert changed == (None if known.size == before else known.size)


@given(
    throughput=st.floats(1, 1e10), target_ms=st.integers(10, 10_000), buffers=st.integers(1, 1_000),
    samples=st.integers(1, 30), threshold=st.integers(0, 50), start=SAMPLES,
)  # fmt: skip
def test_a_steady_throughput_leads_to_its_size(
    throughput: float, target_ms: int, buffers: int, samples: int, threshold: int, start: list[tuple[int, float]]
) -> None:
    """Bytes per second; from wherever the samples before have led."""
    most = 1 << 24
    known = BufferDebloater(
        target_ms=target_ms, period_ms=PERIOD_MS, samples=samples, threshold_percentages=threshold,
        buffers=buffers, max_bytes=most,
    )  # fmt: skip
    for processed, active_ms in start:
        known.measured(processed, active_ms)
    processed = int(throughput * 5)
    for _ in range(40 * samples):
        known.measured(processed, 5_000)
    wanted = min(max(processed / 5 * target_ms / 1000 / buffers, MIN_BUFFER_BYTES), most)
    assert abs(known.size - wanted) <= 1 + max(threshold / 100 * known.size, 0.01 * wanted)


@given(
    st.integers(1 << 10, 1 << 30), st.integers(0, 1 << 30), st.lists(st.integers(0, 1 << 30), min_size=1, max_size=30)
)
def test_a_faster_consumer_never_gets_smaller_buffers(most: int, more: int, samples: list[int]) -> None:
    """Two consumers with the same history but for what one processed more."""
    slow, fast = (
        BufferDebloater(
            target_ms=1_000, period_ms=PERIOD_MS, samples=5, threshold_percentages=0, buffers=20, max_bytes=most
        )
        for _ in range(2)
    )
    for processed in samples:
        slow.measured(processed, PERIOD_MS)
        fast.measured(processed + more, PERIOD_MS)
        assert fast.size >= slow.size
