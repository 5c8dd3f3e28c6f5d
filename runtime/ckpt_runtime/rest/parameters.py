"""The allowed content of a request: parameters of path and query, headers, and the fields of bodies.

The framework checks parameters and headers, and the OpenAPI document describes them. Ids are 32 ASCII hex digits in any
case and reach handlers in lower case. A value that does not match is a 400.

A field of a body that is absent or null gets its default; it may be given under any of its spellings, which must agree.
An error is a 400 that names the field, the value and what is allowed. Unknown fields are ignored, as in Flink, except
in closed bodies.

Requests for metrics name them and their aggregations; the first functions compute the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar
from urllib.parse import unquote

from annotated_types import GroupedMetadata
from fastapi import Depends, Header, Path, Query, Request
from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    StringConstraints,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from ckpt_runtime.contract.cluster import AggregatedMetric, Metric
from ckpt_runtime.jobmaster.gateway_values import Precondition
from ckpt_runtime.jobmaster.metric_table import text_of
from ckpt_runtime.rest.exchange import BadRequest, echo, read_object
from ckpt_runtime.rest.job_answers import FLAME_GRAPH_KINDS

HEX_ID_PATTERN = "^[0-9a-fA-F]{32}$"
OWNER_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}$"

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
HoldOwner = Annotated[str, Path(alias="owner", description="owner of the hold", pattern=OWNER_PATTERN, examples=["me"])]
MetricNames = Annotated[
    list[str] | None, Query(alias="get", description="metric names, separated by commas or repeated")
]
Aggregations = Annotated[
    list[str] | None,
    Query(alias="agg", description="min, max, avg, sum, skew in any case, separated by commas or repeated"),
]
SelectedJobs = Annotated[list[str] | None, Query(alias="jobs", description="job ids, separated by commas or repeated")]
SelectedTaskManagers = Annotated[
    list[str] | None, Query(alias="taskmanagers", description="ids of slot agents, separated by commas or repeated")
]
SelectedSubtasks = Annotated[
    list[str] | None, Query(alias="subtasks", description="indices and ranges of subtasks, such as 0,3-5")
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


MAX_PATH_CHARS = 4096
MAX_TEXT_CHARS = 64 * 1024
MAX_NOTE_CHARS = 1_000
MAX_OPTIONS = 500
MAX_KEY_CHARS = 1024
MAX_ITEMS = 10_000
_MAX_ERRORS = 20
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_ABSOLUTE = re.compile(r"/|[A-Za-z][A-Za-z0-9+.-]*:/")
_ENTRY_POINT = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")

B = TypeVar("B", bound=BaseModel)


def refused(allowed: str, shown: object = None) -> PydanticCustomError:
    """Make the error for a validator to raise; ``shown`` replaces a value that is too large to repeat."""
    return PydanticCustomError("refused", "{allowed}", {"allowed": allowed, "shown": shown})


def _said(allowed: str) -> WrapValidator:
    """Replace pydantic's errors by a message that says what is allowed."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError:
            raise refused(allowed) from None

    return WrapValidator(check)


@dataclass(frozen=True, slots=True)
class Within(GroupedMetadata):
    """Bounds an integer (never a boolean, never 1.0), both ends included."""

    minimum: int
    maximum: int

    def __iter__(self) -> Iterator[object]:
        yield Field(strict=True, ge=self.minimum, le=self.maximum, json_schema_extra={"format": "int64"})
        yield _said(f"it must be an integer from {self.minimum} to {self.maximum}")


@dataclass(frozen=True, slots=True)
class OneOf(GroupedMetadata):
    """Accepts a member of an enum as text in any case."""

    kind: type[StrEnum]

    def __iter__(self) -> Iterator[object]:
        values = [member.value for member in self.kind]
        yield BeforeValidator(_folded)
        yield _said(f"it must be one of {', '.join(values)}")
        yield WithJsonSchema({"enum": values})


def _folded(value: object) -> object:
    return value.upper() if isinstance(value, str) and value.isascii() else value


def spelled(*names: str, **options: Any) -> Any:
    """Declare a field with all its spellings; the first one is documented."""
    return Field(validation_alias=AliasChoices(*names), **options)


def _path(value: str) -> str:
    if not value.strip() or _CONTROL.search(value) or len(value) > MAX_PATH_CHARS:
        raise refused(f"it must be a path of 1 to {MAX_PATH_CHARS} characters without control characters")
    if ".." in re.split(r"[/\\]", value):
        raise refused("it must not contain '..'")
    if not _ABSOLUTE.match(value):
        raise refused("it must be an absolute path or a URL with a scheme")
    return value


def _entry_point(value: str) -> str:
    if len(value) > MAX_PATH_CHARS or not _ENTRY_POINT.fullmatch(value):
        raise refused("it must be module:function")
    return value


def _texts(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(value) > MAX_ITEMS:
        raise refused(f"it must have at most {MAX_ITEMS}", f"{len(value)} strings")
    return value


def _option(value: object) -> str:
    """Convert numbers and booleans to text, as Flink does."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return str(value)
    if not isinstance(value, str):
        raise refused("it must be a string")
    if len(value) > MAX_TEXT_CHARS:
        raise refused(f"it must have at most {MAX_TEXT_CHARS} characters")
    return value


def _options(value: object) -> object:
    if not isinstance(value, dict):
        raise refused("it must be an object of option keys and values")
    if len(value) > MAX_OPTIONS:
        raise refused(f"it must have at most {MAX_OPTIONS}", f"{len(value)} options")
    for key in value:
        if len(key) > MAX_KEY_CHARS:
            raise refused(f"a key must have at most {MAX_KEY_CHARS} characters", key)
    return value


_TEXT = Annotated[StrictStr, _said("it must be a string")]
Flag = Annotated[StrictBool, _said("it must be true or false")]
HexId = Annotated[
    str,
    StringConstraints(strict=True, pattern=HEX_ID_PATTERN),
    _said("it must be 32 hexadecimal digits"),
    AfterValidator(str.lower),
]
Location = Annotated[
    _TEXT,
    AfterValidator(_path),
    WithJsonSchema(
        {
            "type": "string",
            "minLength": 1,
            "maxLength": MAX_PATH_CHARS,
            "description": "an absolute path or a URL, without control characters and '..'",
        }
    ),
]
"""An absolute path or a URL: no control characters, no ``..`` segment."""


def _note(value: str) -> str:
    if len(value) > MAX_NOTE_CHARS or not value.replace("\n", " ").isprintable():
        raise refused(f"it must be at most {MAX_NOTE_CHARS} printable characters", f"{len(value)} characters")
    return value


Note = Annotated[_TEXT, AfterValidator(_note)]
"""A short text for human readers."""
HexIds = Annotated[tuple[HexId, ...], _said("it must be a list of ids, each of 32 hexadecimal digits")]
EntryPoint = Annotated[_TEXT, AfterValidator(_entry_point), Field(description="module:function")]
Owner = Annotated[
    str, StringConstraints(strict=True, pattern=OWNER_PATTERN), _said("it must be 1 to 200 letters, digits and ._:@+-")
]
Texts = Annotated[tuple[StrictStr, ...], _said("it must be a list of strings"), AfterValidator(_texts)]
Options = Annotated[dict[str, Annotated[str, BeforeValidator(_option)]], BeforeValidator(_options)]


_OptionOrNull = Annotated[str | None, BeforeValidator(lambda value: None if value is None else _option(value))]
OptionsPatch = Annotated[dict[str, _OptionOrNull], BeforeValidator(_options)]
"""Like Options, but null removes an option."""

TRIGGER_ID = spelled("triggerId", "trigger-id", default=None)
"""A trigger id chosen by the client, which makes its call idempotent."""


def _names(model: type[BaseModel]) -> list[str]:
    """The documented names of a model's fields."""
    choices = {name: field.validation_alias for name, field in model.model_fields.items()}
    return [
        str(alias.choices[0]) if isinstance(alias, AliasChoices) else alias if isinstance(alias, str) else name
        for name, alias in choices.items()
    ]


class Body(BaseModel):
    """An open body. Subclasses have the names of Flink's own classes, which messages show."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _one_spelling(cls, document: object) -> dict[str, Any]:
        """Drop nulls, and all but one spelling of each field."""
        if not isinstance(document, dict):
            raise refused(f"it must be an object with the fields {', '.join(_names(cls))}")
        given = {name: value for name, value in document.items() if value is not None}
        for field in cls.model_fields.values():
            # pydantic would take the first spelling that it finds and ignore the others
            spellings = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else []
            names = [str(name) for name in spellings if name in given]
            folds = isinstance(field.annotation, type) and issubclass(field.annotation, StrEnum)
            for name in names[1:]:
                first, other = given[names[0]], given.pop(name)
                if first != other and not (folds and _folded(first) == _folded(other)):
                    raise PydanticCustomError(
                        "spellings", "{names} are one field, but have different values", {"names": " and ".join(names)}
                    )
        return given


class ClosedBody(BaseModel):
    """A closed body names the fields to change: at least one and no unknown one; null is a regular value."""

    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_extra={"minProperties": 1})

    @model_validator(mode="before")
    @classmethod
    def _not_empty(cls, document: dict[str, Any]) -> dict[str, Any]:
        if not document:
            names = ", ".join(cls.model_fields)
            raise PydanticCustomError(
                "empty", "The body names no field to change; possible fields are {names}.", {"names": names}
            )
        return document


def checked(model: type[B], document: Mapping[str, Any]) -> B:
    """Make a ``model`` from the body. Raises :class:`BadRequest` with a line for each wrong field."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False)
    raise BadRequest(*[_message(model, problem) for problem in found[:_MAX_ERRORS]])


def _message(model: type[BaseModel], problem: ErrorDetails) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    match problem["type"]:
        case "refused":
            shown = problem["ctx"]["shown"]
            return f"{name}: {echo(problem['input'] if shown is None else shown)} is not acceptable, {problem['msg']}"
        case "missing":
            return f"Field {name} must not be omitted or be null."
        case "extra_forbidden":
            return f"{echo(name)} is not a known field; allowed are {', '.join(model.model_fields)}"
        case _:
            return problem["msg"]


def body_of(model: type[B]) -> Any:
    """Make the dependency that reads and checks a request's body. An empty body is ``{}``, except for closed bodies."""

    async def read(request: Request) -> B:
        empty_is_object = not issubclass(model, ClosedBody)
        return checked(model, await read_object(request, expected=model.__name__, empty_is_object=empty_is_object))

    return Depends(read)
