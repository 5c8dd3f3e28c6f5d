"""Reports of the progress of a job's queries between two completed checkpoints, in Spark's JSON form.

Subtasks send measures with their acknowledgements; those of completed checkpoints are added up here. Reports are kept
in memory only, and only the last ones, as in Spark.
"""

from __future__ import annotations

import json
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import numpy as np
from msgspec.structs import replace

from ckpt_runtime.checkpoint.executions import SubtaskKey
from ckpt_runtime.checkpoint.measures import ENOUGH_LOOKS, EventTimes, Interval, OperatorMeasures
from ckpt_runtime.graph.job_graph import FILTERED, WATERMARK, JobGraph, OperatorNode
from ckpt_runtime.graph.schema import decoded
from ckpt_runtime.graph.specs import ObserveSpec
from ckpt_runtime.sources import Offsets

MOST_REPORTS = 100
"""Number of checkpoints whose reports a job keeps, as Spark does by default."""
_SUFFIX = "-sink"
_SOURCES = ("source", "range_reader")
"""The kinds of operators that read rows; enumerators send them splits."""
_OFFSETS = ("startOffset", "endOffset", "latestOffset")
_DEDUPLICATE = ("dedupe", "dedupeWithinWatermark")
"""The operators with state that pass each row unchanged or drop it as late or as a duplicate."""
_LATEST_MS = 253_402_300_799_999
"""The end of the year 9999."""


@dataclass(frozen=True, slots=True)
class OperatorTotals:
    """The measures of all subtasks of an operator in one interval. The watermark is the minimum of the known ones."""

    rows_in: int = 0
    rows_out: int = 0
    late: int = 0
    updated: int = 0
    removed: int = 0
    bad: int = 0
    stored_rows: int | None = None
    stored_bytes: int = 0
    state: str = ""
    subtasks: int = 0
    watermark: int | None = None
    event_times: EventTimes | None = None
    observed: tuple[bytes, ...] = ()
    pending: int | None = None
    reached: Offsets = field(default_factory=dict)
    latest: Offsets = field(default_factory=dict)
    begun: Offsets = field(default_factory=dict)
    looks: int | None = None
    """The polls without rows of the subtask that has the fewest."""
    uncommitted: bool = False

    def and_(self, more: OperatorMeasures) -> OperatorTotals:
        """Adds the measures of a subtask."""
        times = self.event_times if more.event_times is None else more.event_times
        if self.event_times is not None and more.event_times is not None:
            times = self.event_times.and_(more.event_times)
        return OperatorTotals(
            self.rows_in + more.rows_in,
            self.rows_out + more.rows_out,
            self.late + more.late,
            self.updated + more.updated,
            self.removed + more.removed,
            self.bad + more.bad,
            _sum(self.stored_rows, more.stored_rows),
            self.stored_bytes + (more.stored_bytes or 0),
            more.state or self.state,
            self.subtasks + 1,
            min((*_known(self.watermark), *_known(more.watermark)), default=None),
            times,
            (*self.observed, more.observed) if more.observed else self.observed,
            _sum(self.pending, more.pending),
            _merged(self.reached, more.reached),
            _merged(self.latest, more.latest),
            _merged(self.begun, more.begun, min),
            min(*_known(self.looks), more.looks, more.looks),
            self.uncommitted or more.uncommitted,
        )


def _merged(first: Offsets, second: Offsets, of_both: Callable[[int, int], int] = max) -> Offsets:
    if not first or not second:
        return first or second
    merged = {topic: {**first.get(topic, {}), **second.get(topic, {})} for topic in {**first, **second}}
    for topic in first.keys() & second.keys():
        for part in first[topic].keys() & second[topic].keys():
            merged[topic][part] = of_both(first[topic][part], second[topic][part])
    return merged


def _moved_on(before: Offsets, reached: Offsets) -> Offsets:
    """The offsets that a source has reached. Reading batches of files again does not reset them."""
    return _merged({name: parts for name, parts in before.items() if "" in parts}, reached) or before


def _shown(offsets: Offsets) -> dict[str, Any] | None:
    """Offsets in the form of reports; None if there are none, or if they precede all rows."""
    return {name: parts.get("", parts) for name, parts in offsets.items() if parts.get("") != -1} or None


def _known(value: int | None) -> tuple[int, ...]:
    return () if value is None else (value,)


def _sum(first: int | None, second: int | None) -> int | None:
    known = (*_known(first), *_known(second))
    return sum(known) if known else None


_ENDED = OperatorTotals(looks=ENOUGH_LOOKS)


@dataclass(frozen=True, slots=True)
class _Checkpoint:
    """What a completed checkpoint reports. ``since_ms`` is when the one before it began.

    ``before`` are the offsets that sources had reached then, by the uids of the operators that read them.
    """

    id: int
    since_ms: int
    begun_ms: int
    duration_ms: int
    graph: JobGraph
    totals: Mapping[str, OperatorTotals]
    before: Mapping[str, Offsets]


class JobProgress:
    """The measures of one job under one driver."""

    def __init__(self, job_id: str, query_id: str, started_at_ms: int) -> None:
        self._ids = {"id": query_id, "runId": str(uuid.UUID(job_id))}
        self._reported_at_ms = started_at_ms
        self._completed = -1
        self._acknowledged: dict[int, dict[SubtaskKey, Sequence[Interval]]] = {}
        self._ended: dict[SubtaskKey, Sequence[Interval]] = {}
        self._checkpoints: deque[_Checkpoint] = deque(maxlen=MOST_REPORTS)
        self._reports: dict[int, tuple[str, ...]] = {}
        self._offsets: Mapping[str, Offsets] = {}

    def deployed(self) -> None:
        """Begins a new attempt. Rows that no completed checkpoint covers are read again, and measured again."""
        self._completed = -1
        self._acknowledged, self._ended = {}, {}

    def acknowledged(self, checkpoint_id: int, subtask: SubtaskKey, intervals: Sequence[Interval]) -> None:
        """Stores the measures in the acknowledgement of a pending checkpoint."""
        self._acknowledged.setdefault(checkpoint_id, {})[subtask] = intervals

    def ended(self, subtask: SubtaskKey, intervals: Sequence[Interval]) -> None:
        """Keeps the last measures of a subtask that has finished."""
        self._ended[subtask] = intervals

    def aborted(self, checkpoint_id: int) -> None:
        """Removes a checkpoint that will not complete."""
        self._acknowledged.pop(checkpoint_id, None)

    def completed(self, checkpoint_id: int, begun_ms: int, now_ms: int, graph: JobGraph) -> None:
        """Makes the report of a completed checkpoint."""
        totals: dict[str, OperatorTotals] = {}
        for intervals in {**self._acknowledged.get(checkpoint_id, {}), **self._ended}.values():
            for interval in since(intervals, self._completed, checkpoint_id):
                latest = interval is intervals[-1]
                for measures in interval.operators:
                    totals[measures.uid] = totals.get(measures.uid, OperatorTotals()).and_(
                        measures if latest else _without_levels(measures)
                    )
        self._acknowledged = {id_: known for id_, known in self._acknowledged.items() if id_ > checkpoint_id}
        self._completed = checkpoint_id
        duration = max(0, now_ms - begun_ms)
        since_ms, before = self._reported_at_ms, self._offsets
        self._checkpoints.append(_Checkpoint(checkpoint_id, since_ms, begun_ms, duration, graph, totals, before))
        reached = {uid: each.reached for uid, each in totals.items() if each.reached}
        self._offsets = {**before, **{uid: _moved_on(before.get(uid, {}), each) for uid, each in reached.items()}}
        self._reported_at_ms = begun_ms

    def finished(self, now_ms: int, graph: JobGraph) -> None:
        """Creates the report on the interval that no checkpoint has covered, when all subtasks have finished."""
        ended = [interval for intervals in self._ended.values() for interval in intervals]
        left = since(ended, self._completed, 1 << 62)
        if any(measures.rows_out or measures.rows_in for interval in left for measures in interval.operators):
            self.completed(max(interval.checkpoint_id for interval in left), now_ms, now_ms, graph)

    def has_processed_all(self, since: int) -> bool:
        """Whether all data that existed at a completed checkpoint has been processed and committed by now.

        After the checkpoint, no source has emitted a row, no sink has received one, and each source has polled twice
        without a result: the second poll began after the checkpoint. Sources that generate rows by the clock never poll
        without a result. With them, two more checkpoints have committed the rows that existed.
        """
        behind = [*takewhile(lambda known: known.id > since, reversed(self._checkpoints))]
        clocks = bool(behind) and any(_is_clock(node) for node in _readers(behind[0].graph))
        still = [*takewhile(lambda known: not _moves(known, clocks=clocks), behind)]
        if not still or (len(still) < 2 if clocks else any(each.uncommitted for each in still[0].totals.values())):
            return False
        # A subtask that has ended sends no measures.
        reading = [node.uid for node in _readers(still[0].graph) if not _is_clock(node)]
        looks = {uid: [known.totals.get(uid, _ENDED).looks or 0 for known in still] for uid in reading}
        return all(sum(each) >= ENOUGH_LOOKS for each in looks.values())

    def reports(self) -> list[dict[str, Any]]:
        """The reports of all queries, oldest first. Blocks while it computes what frames have observed."""
        found = {known.id: self._reports.get(known.id) or tuple(self._texts(known)) for known in [*self._checkpoints]}
        self._reports = found
        return [json.loads(text) for texts in found.values() for text in texts]

    def _texts(self, checkpoint: _Checkpoint) -> Iterator[str]:
        for uid, sink in checkpoint.graph.sinks.items():
            if uid == sink:  # a committer belongs to the query of its writers
                yield json.dumps({**self._ids, **_report(checkpoint, uid)})


def _without_levels(measures: OperatorMeasures) -> OperatorMeasures:
    offsets: dict[str, Any] = {"reached": {}, "latest": {}, "begun": {}}
    return replace(measures, stored_rows=None, stored_bytes=None, pending=None, uncommitted=False, **offsets)


def _readers(graph: JobGraph) -> list[OperatorNode]:
    return [node for vertex in graph.vertices for node in vertex.operators if node.kind in (*_SOURCES, "enumerator")]


def _is_clock(node: OperatorNode) -> bool:
    """Whether an operator belongs to a source that generates rows by the clock."""
    return node.name.removesuffix(" offsets") == "rate"


def _moves(checkpoint: _Checkpoint, *, clocks: bool) -> bool:
    """Whether a source has emitted rows, or a sink received some, between the previous checkpoint and this one. Sources
    that generate rows by the clock never count; with ``clocks``, sinks do not count either.
    """
    nothing, totals = OperatorTotals(), checkpoint.totals
    if any(totals.get(node.uid, nothing).rows_out for node in _readers(checkpoint.graph) if not _is_clock(node)):
        return True
    return not clocks and any(totals.get(uid, nothing).rows_in for uid in checkpoint.graph.sinks)


def _above(graph: JobGraph, sink: str) -> list[OperatorNode]:
    """The operators whose rows reach a sink; the sink is the last one."""
    vertex = next(vertex for vertex in graph.vertices if any(node.uid == sink for node in vertex.operators))
    found, todo = {vertex.id}, [vertex.id]
    while todo:
        for edge in graph.inputs(todo.pop()):
            if edge.source not in found:
                found.add(edge.source)
                todo.append(edge.source)
    return [node for each in graph.vertices if each.id in found for node in each.operators]


def _report(checkpoint: _Checkpoint, sink: str) -> dict[str, Any]:
    """The report of one query, without its ids."""
    nodes = _above(checkpoint.graph, sink)
    totals = {node.uid: checkpoint.totals.get(node.uid, OperatorTotals()) for node in nodes}
    seconds = max(1, checkpoint.begun_ms - checkpoint.since_ms) / 1000
    sources = [_source(node, totals, seconds, checkpoint.before) for node in nodes if node.kind in _SOURCES]
    rows = sum(source["numInputRows"] for source in sources)
    last = next(node for node in nodes if node.uid == sink)
    observed = dict(_observed(nodes, totals))
    event_time = _event_time(nodes, totals)
    return {
        "name": last.name if last.uid == f"{last.name}{_SUFFIX}" else None,
        "timestamp": spark_time(checkpoint.begun_ms),
        "batchId": checkpoint.id,
        "batchDuration": checkpoint.duration_ms,
        "numInputRows": rows,
        "inputRowsPerSecond": rows / seconds,
        "processedRowsPerSecond": rows / seconds,
        "durationMs": {"triggerExecution": checkpoint.duration_ms},
        **({"eventTime": event_time} if event_time else {}),
        "stateOperators": [_state(totals[node.uid]) for node in reversed(nodes) if totals[node.uid].state],
        "sources": sources,
        "sink": {"description": last.name, "numOutputRows": totals[sink].rows_in},
        **({"observedMetrics": observed} if observed else {}),
    }


def _source(
    node: OperatorNode, totals: Mapping[str, OperatorTotals], seconds: float, before: Mapping[str, Offsets]
) -> dict[str, Any]:
    """The report of a source. Unknown offsets are None, such as the start in the first report of most jobs."""
    read = totals[node.uid]
    metrics = {"numBadRecordsDropped": str(sum(each.bad for each in totals.values()))}
    if read.pending is not None:
        metrics["pendingRecords"] = str(read.pending)
    behind = [
        latest - read.reached[topic][part] for topic, parts in read.latest.items() for part, latest in parts.items()
    ]
    if behind:
        metrics["minOffsetsBehindLatest"] = str(min(behind))
        metrics["maxOffsetsBehindLatest"] = str(max(behind))
        metrics["avgOffsetsBehindLatest"] = str(sum(behind) / len(behind))
    start = before.get(node.uid) or read.begun
    known = start, _moved_on(start, read.reached), read.latest
    offsets = {name: _shown(each) for name, each in zip(_OFFSETS, known, strict=True)}
    rate = read.rows_out / seconds
    rates = {"inputRowsPerSecond": rate, "processedRowsPerSecond": rate}
    return {"description": node.name, **offsets, "numInputRows": read.rows_out, **rates, "metrics": metrics}


def _state(totals: OperatorTotals) -> dict[str, Any]:
    """An operator with state. Spark's times of parts of a batch have no meaning between checkpoints."""
    custom = {}
    if totals.state in _DEDUPLICATE:
        custom["numDroppedDuplicateRows"] = totals.rows_in - totals.late - totals.rows_out
    return {
        "operatorName": totals.state,
        "numRowsTotal": totals.stored_rows or 0,
        "numRowsUpdated": totals.updated,
        "allUpdatesTimeMs": 0,
        "numRowsRemoved": totals.removed,
        "allRemovalsTimeMs": 0,
        "commitTimeMs": 0,
        "memoryUsedBytes": totals.stored_bytes,
        "numRowsDroppedByWatermark": totals.late,
        "numShufflePartitions": totals.subtasks,
        "numStateStoreInstances": totals.subtasks,
        "customMetrics": custom,
    }


def _event_time(nodes: Iterable[OperatorNode], totals: Mapping[str, OperatorTotals]) -> dict[str, str]:
    """Event times of the rows, and the time that all operators have reached: at least 1970, as in Spark.

    The watermark of the end of data is later than all times that have a text form.
    """
    marked = [node for node in nodes if node.kind == WATERMARK]
    filtered = {node.uid.partition(FILTERED)[0] for node in marked if FILTERED in node.uid}
    marked = [node for node in marked if node.uid not in filtered]  # the query's own event time is behind filters
    if not marked:
        return {}
    found: EventTimes | None = None
    for node in marked:
        times = totals[node.uid].event_times
        if times is not None:
            found = times if found is None else found.and_(times)
    # Subtasks of a watermark that have ended do not hold back the operators with state behind them.
    stateful = [each for each in totals.values() if each.state]
    marks = [each.watermark for each in stateful or totals.values() if each.watermark is not None]
    reached = min((mark for mark in marks if mark <= _LATEST_MS), default=0)
    shown = {"watermark": spark_time(max(0, reached))}
    if found is not None and found.rows:
        mean = int(found.total / found.rows)
        shown |= {"max": spark_time(found.greatest), "min": spark_time(found.least), "avg": spark_time(mean)}
    return shown


def _observed(
    nodes: Iterable[OperatorNode], totals: Mapping[str, OperatorTotals]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and the metrics of each ``observe``."""
    for node in nodes:
        if node.observation is not None:
            # Imported here, because compiled kernels take a second to load, and few jobs observe anything.
            from ckpt_runtime.operators.observe import Observation

            spec = decoded(node.observation.encode(), ObserveSpec)
            yield spec.name, Observation(spec).results(totals[node.uid].observed)


def spark_time(millis: int) -> str:
    """Returns a time in the form of Spark's reports and events. ``millis`` are since 1970.

    Rows may have years that :class:`datetime.datetime` cannot hold, for example when their unit was mistaken.
    """
    return f"{'+' if millis > _LATEST_MS else ''}{np.datetime64(millis, 'ms')}Z"


def since(intervals: Iterable[Interval], completed: int, checkpoint_id: int) -> list[Interval]:
    """Returns the intervals that a checkpoint reports if ``completed`` is the one that completed before it."""
    return [interval for interval in intervals if completed < interval.checkpoint_id <= checkpoint_id]
