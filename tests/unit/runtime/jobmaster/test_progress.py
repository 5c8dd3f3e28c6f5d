"""Reports of progress: from the measures of subtasks to what a query has done between two checkpoints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ckpt_runtime.checkpoint.measures import EventTimes, Interval, OperatorMeasures
from ckpt_runtime.graph.job_graph import JobEdge, JobGraph, JobVertex, OperatorNode, Partitioning
from ckpt_runtime.jobmaster.progress import MOST_REPORTS, JobProgress, OperatorTotals, spark_time

JOB, QUERY = "0" * 32, "11111111-1111-1111-1111-111111111111"
SOURCE, SINK = "a" * 32, "b" * 32
GRAPH = JobGraph(
    "job",
    (
        JobVertex(SOURCE, (OperatorNode("in", "in", "source"), OperatorNode("time", "time", "watermark")), 2),
        JobVertex(SINK, (OperatorNode("state", "state", "aggregate"), OperatorNode("out-sink", "out", "sink")), 1),
    ),
    (JobEdge(SOURCE, SINK, Partitioning.HASH, ("k",)),),
)
END_OF_DATA = (1 << 63) - 1


def read(checkpoint_id: int, rows: int, times: EventTimes | None = None, watermark: int | None = None) -> Interval:
    time = OperatorMeasures("time", rows_in=rows, rows_out=rows, event_times=times, watermark=watermark)
    return Interval(checkpoint_id, (OperatorMeasures("in", rows_out=rows, bad=1, pending=rows), time))


def written(checkpoint_id: int, rows: int, stored: int, late: int = 0, watermark: int | None = None) -> Interval:
    state = OperatorMeasures(
        "state", "stateStoreSave", late=late, updated=rows, stored_rows=stored, watermark=watermark
    )
    return Interval(checkpoint_id, (state, OperatorMeasures("out-sink", rows_in=rows)))


def complete(
    progress: JobProgress, id_: int, reads: list[list[Interval]], *writes: Interval, graph: JobGraph = GRAPH
) -> dict[str, Any]:
    """Acknowledges and completes a checkpoint, and returns its report."""
    for subtask, intervals in enumerate(reads):
        progress.acknowledged(id_, (SOURCE, subtask), intervals)
    progress.acknowledged(id_, (SINK, 0), writes)
    progress.completed(id_, id_ * 1000, id_ * 1000 + 30, graph)
    return progress.reports()[-1]


@pytest.mark.parametrize(
    ("watermarks", "least"), [((8, None), 8), ((None, 8), 8), ((9, None, 8), 8), ((None, None), None)]
)
def test_subtasks_without_a_watermark_do_not_change_that_of_the_others(
    watermarks: tuple[int | None, ...], least: int | None
) -> None:
    totals = OperatorTotals()
    for watermark in watermarks:
        totals = totals.and_(OperatorMeasures("time", watermark=watermark))
    assert totals.watermark == least


@pytest.mark.parametrize(
    ("millis", "text"),
    [
        (0, "1970-01-01T00:00:00.000Z"),
        (-1, "1969-12-31T23:59:59.999Z"),
        (1_795_861_230_500, "2026-11-28T10:20:30.500Z"),
        (253_402_300_799_999, "9999-12-31T23:59:59.999Z"),
        (253_402_300_800_000, "+10000-01-01T00:00:00.000Z"),
        ((1 << 63) // 1000, "+294247-01-10T04:00:54.775Z"),
    ],
)
def test_each_time_of_a_timestamp_column_has_a_text(millis: int, text: str) -> None:
    assert spark_time(millis) == text


def test_report_adds_up_the_subtasks_of_an_interval() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    first, second = EventTimes(1_000, 9_000, 10_000.0, 2), EventTimes(500, 2_000, 2_500.0, 2)
    report = complete(
        progress, 2, [[read(2, 30, first, 8_000)], [read(2, 10, second, 1_500)]], written(2, 7, 5, 3, 1_500)
    )
    assert (report["id"], report["runId"]) == (QUERY, "00000000-0000-0000-0000-000000000000")
    assert report["name"] == "out"
    assert report["batchId"] == 2
    assert report["numInputRows"] == 40
    assert report["inputRowsPerSecond"] == report["processedRowsPerSecond"] == 20.0
    assert report["eventTime"] == {
        "watermark": "1970-01-01T00:00:01.500Z",
        "min": "1970-01-01T00:00:00.500Z",
        "max": "1970-01-01T00:00:09.000Z",
        "avg": "1970-01-01T00:00:03.125Z",
    }
    [state] = report["stateOperators"]
    assert state["operatorName"] == "stateStoreSave"
    assert [state[key] for key in ("numRowsTotal", "numRowsUpdated", "numRowsDroppedByWatermark")] == [5, 7, 3]
    [source] = report["sources"]
    assert source["numInputRows"] == 40
    assert source["metrics"] == {"numBadRecordsDropped": "2", "pendingRecords": "40"}
    assert report["sink"] == {"description": "out", "numOutputRows": 7}


def test_rows_of_an_aborted_checkpoint_are_part_of_the_next_report_and_its_levels_are_not() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    progress.acknowledged(1, (SOURCE, 0), [read(1, 30)])
    progress.aborted(1)
    report = complete(progress, 2, [[read(1, 30), read(2, 5)]], written(1, 9, 6), written(2, 1, 4))
    assert report["numInputRows"] == 35
    assert report["stateOperators"][0]["numRowsTotal"] == 4
    assert report["stateOperators"][0]["numRowsUpdated"] == 10


def test_rows_that_are_neither_late_nor_passed_on_are_duplicates() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    state = OperatorMeasures("state", "dedupe", rows_in=12, rows_out=7, late=2, updated=7)
    report = complete(progress, 1, [[read(1, 12)]], Interval(1, (state, OperatorMeasures("out-sink", rows_in=7))))
    assert report["stateOperators"][0]["customMetrics"] == {"numDroppedDuplicateRows": 3}


def test_interval_that_an_earlier_checkpoint_has_reported_is_not_reported_again() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    complete(progress, 1, [[read(1, 30)]], written(1, 9, 6))
    assert complete(progress, 2, [[read(1, 30), read(2, 5)]], written(2, 1, 4))["numInputRows"] == 5


def looked(checkpoint_id: int, *looks: int, rows: int = 0) -> list[list[Interval]]:
    """What the source's subtasks measure when they have looked so often for rows, and have read so many."""
    return [[Interval(checkpoint_id, (OperatorMeasures("in", rows_out=rows, looks=each),))] for each in looks]


def emptied(checkpoint_id: int, rows: int = 0, *, uncommitted: bool = False) -> Interval:
    return Interval(checkpoint_id, (OperatorMeasures("out-sink", rows_in=rows, uncommitted=uncommitted),))


def test_all_data_is_processed_when_sources_have_looked_in_vain_and_sinks_have_committed() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    steps = [
        (looked(1, 9, 9), emptied(1), False),  # the checkpoint after which data counts
        (looked(2, 1, 5), emptied(2), False),  # a subtask has looked once
        (looked(3, 1, 1, rows=1), emptied(3), False),  # one has found rows
        (looked(4, 1, 1), emptied(4, 2), False),  # rows have come to the sink
        (looked(5, 1, 2), emptied(5), False),
        (looked(6, 1, 0), emptied(6), False),
        (looked(7, 1, 1), emptied(7, uncommitted=True), False),
        (looked(8, 1, 1), emptied(8), True),
    ]
    for id_, (reads, writes, processed) in enumerate(steps, 1):
        complete(progress, id_, reads, writes)
        assert progress.has_processed_all(1) == processed, id_
    assert not progress.has_processed_all(7)


def test_source_that_makes_rows_as_time_passes_has_no_last_row_to_wait_for() -> None:
    read, *others = GRAPH.vertices[0].operators
    clock = replace(GRAPH.vertices[0], operators=(replace(read, name="rate"), *others))
    graph = replace(GRAPH, vertices=(clock, *GRAPH.vertices[1:]))
    progress = JobProgress(JOB, QUERY, 0)
    for id_, processed in enumerate((False, False, True), 1):
        complete(progress, id_, looked(id_, 0, 0, rows=5), emptied(id_, 5, uncommitted=True), graph=graph)
        assert progress.has_processed_all(1) == processed, id_


def test_committer_makes_no_report_beside_that_of_its_sink() -> None:
    committer = JobVertex("c" * 32, (OperatorNode("out-commit", "out commit", "committer"),), 1)
    edge = JobEdge(SINK, committer.id, Partitioning.REBALANCE)
    graph = replace(GRAPH, vertices=(*GRAPH.vertices, committer), edges=(*GRAPH.edges, edge))
    progress = JobProgress(JOB, QUERY, 0)
    assert complete(progress, 1, [[read(1, 4)]], written(1, 4, 4), graph=graph)["name"] == "out"
    assert len(progress.reports()) == 1


def test_subtasks_that_have_ended_have_no_more_data() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    for subtask, intervals in enumerate(looked(1, 0, 0, rows=3)):
        progress.ended((SOURCE, subtask), intervals)
    complete(progress, 2, [], emptied(2, 6))
    assert not progress.has_processed_all(1)
    complete(progress, 3, [], emptied(3))
    assert progress.has_processed_all(1)


def test_new_attempt_reports_nothing_of_the_one_before_it() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    complete(progress, 5, [[read(5, 1)]])
    progress.acknowledged(6, (SOURCE, 0), [read(6, 30)])
    progress.ended((SOURCE, 1), [read(6, 30)])
    progress.deployed()
    assert complete(progress, 7, [[read(7, 2)]])["numInputRows"] == 2


def test_rows_of_subtasks_that_finished_are_reported_once_with_the_next_checkpoint() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    complete(progress, 1, [[read(1, 1)], [read(1, 1)]])
    progress.ended((SOURCE, 0), [read(2, 10)])
    assert complete(progress, 3, [[], [read(3, 5)]])["numInputRows"] == 15
    progress.ended((SOURCE, 1), [read(4, 2)])
    progress.finished(9_000, GRAPH)
    assert [report["numInputRows"] for report in progress.reports()] == [2, 15, 2]


def test_last_reports_are_kept_and_a_finished_job_has_no_further_one() -> None:
    progress = JobProgress(JOB, QUERY, 0)
    complete(progress, 1, [[read(1, 1)]])
    progress.ended((SOURCE, 0), [read(2, 0)])
    progress.finished(9_000, GRAPH)
    assert len(progress.reports()) == 1
    progress = JobProgress(JOB, QUERY, 0)
    for id_ in range(MOST_REPORTS + 5):
        complete(progress, id_, [[read(id_, 1)]])
    assert [report["batchId"] for report in progress.reports()] == [*range(5, MOST_REPORTS + 5)]


@pytest.mark.parametrize(
    ("watermarks", "reported"),
    [
        ((None, None), "1970-01-01T00:00:00.000Z"),
        ((END_OF_DATA, 1_700_000_000_122), "2023-11-14T22:13:20.122Z"),
        ((-5, None), "1970-01-01T00:00:00.000Z"),
    ],
)
def test_report_has_the_least_watermark_that_is_not_the_end_of_data(
    watermarks: tuple[int | None, int | None], reported: str
) -> None:
    progress = JobProgress(JOB, QUERY, 0)
    report = complete(progress, 1, [[read(1, 1, watermark=watermarks[0])]], written(1, 1, 1, watermark=watermarks[1]))
    assert report["eventTime"] == {"watermark": reported}


def test_report_has_the_event_times_of_rows_that_no_moved_filter_drops() -> None:
    [first, *rest] = GRAPH.vertices
    own = OperatorNode("time.filtered.out", "time.filtered.out", "watermark")
    graph = replace(GRAPH, vertices=(replace(first, operators=(*first.operators, own)), *rest))
    [*known, time] = read(1, 2, EventTimes(1_000, 9_000, 10_000.0, 2)).operators
    passed = OperatorMeasures(own.uid, rows_in=1, event_times=EventTimes(1_000, 1_000, 1_000.0, 1))
    progress = JobProgress(JOB, QUERY, 0)
    report = complete(progress, 1, [[Interval(1, (*known, time, passed))]], written(1, 1, 1), graph=graph)
    assert {report["eventTime"][name] for name in ("min", "max", "avg")} == {"1970-01-01T00:00:01.000Z"}


def test_report_shows_the_offsets_of_all_subtasks_and_how_far_they_are_behind() -> None:
    def at(checkpoint_id: int, partition: str, reached: int, latest: int) -> list[Interval]:
        offsets = {"reached": {"orders": {partition: reached}}, "latest": {"orders": {partition: latest}}}
        return [Interval(checkpoint_id, (OperatorMeasures("in", rows_out=1, **offsets),))]  # type: ignore[arg-type]

    progress = JobProgress(JOB, QUERY, 0)
    [source] = complete(progress, 1, [at(1, "0", 5, 5), at(1, "1", 7, 7)])["sources"]
    assert (source["startOffset"], source["endOffset"]) == (None, {"orders": {"0": 5, "1": 7}})
    [source] = complete(progress, 2, [at(2, "0", 6, 9), at(2, "1", 7, 8)])["sources"]
    assert source["startOffset"] == {"orders": {"0": 5, "1": 7}}
    assert source["endOffset"] == {"orders": {"0": 6, "1": 7}}
    assert source["latestOffset"] == {"orders": {"0": 9, "1": 8}}
    behind = {name: source["metrics"][f"{name}OffsetsBehindLatest"] for name in ("min", "max", "avg")}
    assert behind == {"min": "1", "max": "3", "avg": "2.0"}
    progress.deployed()
    [source] = complete(progress, 3, [at(3, "0", 8, 9), at(3, "1", 8, 8)])["sources"]
    assert source["startOffset"] == {"orders": {"0": 6, "1": 7}}


@pytest.mark.parametrize(("first", "start"), [(0, None), (3, {"logOffset": 2})])
def test_report_shows_the_batches_of_files_from_which_a_job_has_begun_and_which_its_subtasks_have_reached(
    first: int, start: dict[str, int] | None
) -> None:
    def at(checkpoint_id: int, begun: int | None, reached: int | None) -> list[Interval]:
        given = {"begun": begun, "reached": reached}
        known: dict[str, Any] = {key: {"logOffset": {"": each}} for key, each in given.items() if each is not None}
        return [Interval(checkpoint_id, (OperatorMeasures("in", rows_out=1, **known),))]

    def offsets(checkpoint_id: int, *reads: list[Interval]) -> tuple[Any, Any]:
        [source] = complete(progress, checkpoint_id, [*reads])["sources"]
        return source["startOffset"], source["endOffset"]

    progress = JobProgress(JOB, QUERY, 0)
    # The second subtask has got the next batch, and has not read it.
    assert offsets(1, at(1, first - 1, None), at(1, first, None)) == (start, start)
    assert offsets(2, at(2, first - 1, first), at(2, first, first + 1)) == (start, {"logOffset": first + 1})
    progress.deployed()
    # The first subtask reads its file again; the other one has none.
    assert offsets(3, at(3, first - 1, first), at(3, None, None)) == ({"logOffset": first + 1},) * 2
    assert offsets(4, at(4, first - 1, first + 2), at(4, None, None))[1] == {"logOffset": first + 2}
