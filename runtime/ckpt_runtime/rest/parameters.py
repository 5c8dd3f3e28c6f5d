"""Path and query parameters and headers, as the framework checks them and the OpenAPI document describes them.

Ids are 32 ASCII hex digits in any case and reach handlers in lower case. A value that does not match is a 400.

Requests for metrics name them and their aggregations; :func:`metrics` and its like compute the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Header, Path, Query
from pydantic import AfterValidator

from ckpt_runtime.contract.cluster import AggregatedMetric, Metric
from ckpt_runtime.jobmaster.gateway_values import Precondition
from ckpt_runtime.jobmaster.metric_table import text_of
from ckpt_runtime.rest.job_answers import FLAME_GRAPH_KINDS
from ckpt_runtime.rest.responses import BadRequest, echo

AGGREGATIONS = ("min", "max", "avg", "sum", "skew")


def by_subtask(metrics: Mapping[int, Mapping[str, float]]) -> dict[str, str]:
    """Metric values as text, by names such as ``0.numRecordsIn``."""
    return {f"{index}.{name}": text_of(value) for index, own in metrics.items() for name, value in own.items()}


def listing(values: Mapping[str, str], names: Sequence[str] | None) -> list[Metric]:
    """Lists all names if none was requested, else the values of the requested metrics that exist."""
    if names is None:
        return [Metric(name) for name in values]
    return [Metric(name, values[name]) for name in dict.fromkeys(names) if name in values]


def aggregated(
    samples: Iterable[Mapping[str, float]], names: Sequence[str] | None, kinds: Sequence[str]
) -> list[AggregatedMetric]:
    """Aggregates each requested metric over the samples which have it; lists all names if none was requested."""
    collected: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.items():
            collected.setdefault(name, []).append(float(value))
    if names is None:
        return [AggregatedMetric(name) for name in collected]
    return [
        AggregatedMetric(name, **{kind: _aggregate(kind, collected[name]) for kind in kinds})
        for name in dict.fromkeys(names)
        if name in collected
    ]


def _aggregate(kind: str, values: Sequence[float]) -> float:
    average = sum(values) / len(values)
    match kind:
        case "min":
            return min(values)
        case "max":
            return max(values)
        case "avg":
            return average
        case "sum":
            return sum(values)
    deviation = sum(abs(value - average) for value in values) / len(values)
    return 100.0 * deviation / average if average else 0.0


_MOST_SUBTASKS = 32767
HEX_ID_PATTERN = "^[0-9a-fA-F]{32}$"
OWNER_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}$"
_JOB, _VERTEX = "fa461ac280c9aa36bde4a060aa97618c", "f74362dd18da632fe7d708268d6f8693"
_TRIGGER = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"


def _hex_id(alias: str, description: str, example: str) -> Any:
    return Path(alias=alias, description=description, pattern=HEX_ID_PATTERN, examples=[example])


_LOWER = AfterValidator(str.lower)


JobId = Annotated[str, _hex_id("jobid", "job id, 32 hex digits", _JOB), _LOWER]
ApplicationId = Annotated[str, _hex_id("applicationid", "the job's id", _JOB), _LOWER]
VertexId = Annotated[str, _hex_id("vertexid", "vertex id, 32 hex digits", _VERTEX), _LOWER]
TriggerId = Annotated[str, _hex_id("triggerid", "trigger id, 32 hex digits", _TRIGGER), _LOWER]
SlotAgentId = Annotated[
    str, Path(alias="taskmanagerid", description="id of a slot agent", max_length=200, examples=["0-1"])
]
LogName = Annotated[
    str, Path(alias="filename", description="name of a log file", max_length=200, examples=["worker.log"])
]
CheckpointId = Annotated[
    str, Path(alias="checkpointid", description="checkpoint id", pattern="^[0-9]{1,19}$", examples=["42"])
]
PipelineId = Annotated[
    str, Path(alias="jarid", description="id of an uploaded pipeline", pattern="^[A-Za-z0-9_][A-Za-z0-9._-]{0,199}$")
]
SubtaskIndex = Annotated[
    int, Path(alias="subtaskindex", description="index of a subtask", ge=0, le=_MOST_SUBTASKS, examples=["0"])
]
Attempt = Annotated[int, Path(alias="attempt", description="number of an attempt", ge=0, le=2**31 - 1, examples=["0"])]
HoldOwner = Annotated[
    str,
    Path(
        alias="owner",
        description="owner of the hold",
        pattern=OWNER_PATTERN,
        examples=["me"],
    ),
]
MetricNames = Annotated[
    list[str] | None, Query(alias="get", description="metric names, separated by commas or repeated")
]
Aggregations = Annotated[
    list[str] | None,
    Query(alias="agg", description="min, max, avg, sum, skew in any case, separated by commas or repeated"),
]
SelectedJobs = Annotated[list[str] | None, Query(alias="jobs", description="job ids, separated by commas or repeated")]
SelectedTaskManagers = Annotated[
    list[str] | None,
    Query(alias="taskmanagers", description="ids of slot agents, separated by commas or repeated"),
]
SelectedSubtasks = Annotated[
    list[str] | None,
    Query(alias="subtasks", description="indices and ranges of subtasks, such as 0,3-5"),
]
FlameGraphKind = Annotated[
    str,
    Query(
        alias="type",
        description="full, on_cpu or off_cpu, in any case",
        pattern=f"(?i)^({'|'.join(FLAME_GRAPH_KINDS)})$",
    ),
]
OneSubtask = Annotated[
    int | None, Query(alias="subtaskindex", description="only samples of this subtask", ge=0, le=_MOST_SUBTASKS)
]
FailureLabels = Annotated[
    list[str] | None, Query(alias="failureLabelFilter", description="key:value; failures have no labels here")
]
MaxExceptions = Annotated[int, Query(alias="maxExceptions", ge=1, le=1000, description="maximum number of entries")]
REQUESTER_HEADER = "Ckpt-Requester"
Requester = Annotated[
    str | None,
    Header(
        alias=REQUESTER_HEADER,
        description="name of the requester, percent-encoded, for the savepoint catalogue",
        pattern="^[ -~]{1,600}$",
        examples=["airflow: nightly/savepoint"],
    ),
    AfterValidator(lambda text: None if text is None else unquote(text, errors="replace")[:200]),
]
UPGRADE_OWNER_HEADER, INCARNATION_HEADER = "Ckpt-Upgrade-Owner", "Ckpt-Expected-Incarnation"


async def _condition(
    owner: Annotated[
        str | None,
        Header(
            alias=UPGRADE_OWNER_HEADER,
            description="owner of the upgrade to which the request belongs; refused unless it holds the job's lineage",
            pattern=OWNER_PATTERN,
        ),
    ] = None,
    incarnation: Annotated[
        int | None,
        Header(
            alias=INCARNATION_HEADER,
            description="refused unless the job, or the latest job of the lineage that a new job joins, is this one",
            ge=1,
        ),
    ] = None,
) -> Precondition:
    return Precondition(owner, incarnation)


Condition = Annotated[Precondition, Depends(_condition)]
SavepointDirectory = Annotated[
    str | None,
    Query(
        alias="directory",
        description="absolute path or URL; default: the configured savepoint directory",
        min_length=1,
        max_length=4096,
        examples=["/data/savepoints"],
    ),
]
CompletedBefore = Annotated[
    int | None,
    Query(alias="before", description="time in milliseconds since 1970", ge=0, le=2**53, examples=["1795600800000"]),
]
SavepointsOfJob = Annotated[
    str | None,
    Query(alias="job", description="id or name of a job", min_length=1, max_length=1000, examples=["flights"]),
]


def listed(texts: list[str] | None) -> list[str] | None:
    """The values of a query parameter, separated by commas or given repeatedly; None if it was not given."""
    if texts is None:
        return None
    return [name for text in texts for name in (part.strip() for part in text.split(",")) if name]


def aggregations(texts: list[str] | None) -> list[str]:
    """The requested aggregations; all of them if none is named."""
    kinds = [kind.lower() for kind in listed(texts) or AGGREGATIONS]
    for kind in kinds:
        if kind not in AGGREGATIONS:
            raise BadRequest(f"agg: {echo(kind)} is not acceptable, it must be of {', '.join(AGGREGATIONS)}")
    return kinds


def selected_jobs(texts: list[str] | None) -> set[str] | None:
    """The job ids in lower case. Raises :class:`BadRequest` for an invalid id."""
    names = listed(texts)
    for name in names or ():
        if re.fullmatch(HEX_ID_PATTERN, name) is None:
            raise BadRequest(f"jobs: {echo(name)} is not acceptable, it must be 32 hexadecimal digits")
    return None if names is None else {name.lower() for name in names}


def selected_subtasks(texts: list[str] | None) -> Callable[[int], bool]:
    """A function that says whether a subtask index is selected. Raises :class:`BadRequest` for invalid ranges."""
    names = listed(texts)
    if names is None:
        return lambda _: True
    ranges = [(int(first), int(last or first)) for first, last in map(_subtask_range, names)]
    return lambda index: any(first <= index <= last for first, last in ranges)


def _subtask_range(text: str) -> tuple[str, str | None]:
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if found is None:
        raise BadRequest(f"subtasks: {echo(text)} is not acceptable, it must be an index or a range, such as 0 or 3-5")
    return found[1], found[2]
