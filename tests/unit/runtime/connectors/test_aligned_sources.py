"""Readers whose watermarks are aligned: they wait, report how far they are, and keep that in their state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_runtime.connectors.registry import create_connector
from ckpt_runtime.connectors.split_source import SplitReaderOperator
from ckpt_runtime.graph.formats import source_schema
from ckpt_runtime.graph.specs import RangeReaderSpec, WatermarkSpec
from ckpt_runtime.operators.operator import ChainTime
from ckpt_runtime.operators.watermark import WatermarkOperator
from ckpt_runtime.scheduler.watermark_alignment import Progress
from tests.unit.runtime.connectors.harness import Clock, Collector, context, opened
from tests.unit.runtime.connectors.split_jobs import Job, States

pytestmark = pytest.mark.row("ends.3")

OPTIONS = {
    "rowsPerBatch": "2",
    "numPartitions": "1",
    "scan.watermark.alignment.group": "g",
    "scan.watermark.alignment.max-drift": "5 s",
}


class Aligned:
    """One reader of ``rate-micro-batch``, whose batches are a second apart, with ``withWatermark`` behind it."""

    def __init__(self, options: dict[str, str] | None = None, restored: tuple[States, States] | None = None) -> None:
        self.clock = Clock()
        self.reports: list[Progress] = []
        self.timers: list[int] = []
        given = {**OPTIONS, **(options or {})}
        self.job = Job("rate-micro-batch", given, restored=restored)
        reader = create_connector(RangeReaderSpec("rate-micro-batch", given, source_schema("rate", {}, None)))
        assert isinstance(reader, SplitReaderOperator)
        self.reader = self.job.readers[0] = reader
        self.chain = ChainTime()
        self.watermark = WatermarkOperator(WatermarkSpec("timestamp", 0))
        marks = replace(context(now_ms=self.clock), chain_time=self.chain)
        self.passed: Collector = opened(self.watermark, marks)
        self.job.outputs[0].forward = lambda batch: self.watermark.process_batch(batch, 0)
        state = [] if restored is None else restored[1][0]
        where = context(state=state, monotonic_ms=self.clock, set_timer=self.timers.append)
        self.reader.open(
            replace(where, chain_time=self.chain, report_progress=self.reports.append), self.job.outputs[0]
        )

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.job.discover()
            self.clock.ms += 100
            self.job.read()

    @property
    def second(self) -> int:
        """The event time of the last row."""
        rows: list[dict[str, Any]] = self.job.rows
        return int(rows[-1]["timestamp"].timestamp())


def test_reader_waits_ahead_of_its_group_and_reads_on_when_the_group_has_come_up() -> None:
    aligned = Aligned()
    aligned.run(10)
    assert (aligned.second, aligned.reports[-1]) == (0, Progress(0))  # before the driver knows the group
    aligned.reader.align(0)
    aligned.run(100)
    assert aligned.second == 6  # the first row behind the limit shows that it is reached
    assert aligned.reports[-1] == Progress(6_000)
    assert aligned.chain.held
    aligned.timers.clear()
    aligned.reader.align(10_000)
    assert aligned.timers == [0]  # at once
    aligned.run(100)
    assert (aligned.second, aligned.reader.alignment_drift_ms) == (16, 6_000)
    assert sorted(row["value"] for row in aligned.job.rows) == list(range(34))


def test_reports_come_at_the_update_interval_or_when_the_reader_has_to_wait() -> None:
    aligned = Aligned({"scan.watermark.alignment.update-interval": "350 ms"})
    aligned.run(2)
    assert aligned.reports == [Progress(None), Progress(0)]
    aligned.reader.align(0)
    aligned.run(5)
    assert aligned.reports[2:] == [Progress(3_000)]
    aligned.run(5)
    assert aligned.reports[3:] == [Progress(6_000)]


def test_paused_reader_still_reports_its_progress() -> None:
    aligned = Aligned()
    aligned.reader.align(0)
    aligned.run(3)
    assert aligned.reports[-1] == Progress(None)
    aligned.reader.limit({"op": 0.0})
    aligned.run(20)
    assert (aligned.second, aligned.reports[-1]) == (2, Progress(2_000))


def test_restored_reader_knows_its_progress_before_it_has_read_a_row() -> None:
    before = Aligned({"rowsPerBatch": "100000"})
    before.run(1)  # the first part of a batch of second 0
    before.reader.align(-100_000)
    assert before.reader.alignment_drift_ms == 100_000
    after = Aligned({"rowsPerBatch": "100000"}, before.job.checkpoint(1))
    after.reader.align(-100_000)
    after.run(10)
    assert after.job.rows == []
    assert after.reports[-1] == Progress(0)
    after.reader.align(-5_000)
    after.run(1)
    assert after.job.rows


def test_subtask_that_waits_for_other_sources_is_not_idle() -> None:
    aligned = Aligned()
    marks = replace(aligned.watermark.context, configuration={"pipeline.source.idle-timeout": "100 ms"})
    aligned.watermark.open(marks, aligned.passed)
    aligned.run(20)
    aligned.passed.watermarks.clear()
    for _ in range(20):
        aligned.clock.ms += 25
        aligned.watermark.on_processing_time(aligned.clock.ms)
    assert aligned.passed.watermarks == []
