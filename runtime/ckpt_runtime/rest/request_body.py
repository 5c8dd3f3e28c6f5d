"""What a request contains: path and query parameters, a JSON body read within limits, uploaded pipelines.

JSON is read more strictly than by the standard library: no NaN, Infinity or overflowing number, no duplicate key, no
lone surrogate, no deep nesting. An upload is one multipart part called ``jarfile``, a ``.py`` or a ``.zip``; the
client's file name is only displayed and never used as a path. Every refusal is a 4xx :class:`ApiError`.

Path and query parameters are checked by the framework and described in the OpenAPI document. Ids are 32 ASCII hex
digits in any case and reach handlers in lower case. A value that does not match is a 400.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import unquote

from fastapi import Depends, Header, Path, Query, Request
from pydantic import AfterValidator
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import Precondition, StoredPipeline
from ckpt_runtime.rest.job_answers import FLAME_GRAPH_KINDS
from ckpt_runtime.rest.metrics import AGGREGATIONS
from ckpt_runtime.rest.responses import ApiError, BadRequest, echo

MAX_BODY_BYTES = 256 * 1024
MAX_DEPTH = 32
BODY_TIMEOUT_S = 30.0
_MAX_DIGITS = 400
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[\[\]{}]')


async def limited_stream(request: Request, limit: int) -> AsyncIterator[bytes]:
    """Yield the body's chunks. Raises 413 as soon as ``limit`` bytes are exceeded, 408 if the client stalls."""
    chunks = _limited(request, limit)
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk = await anext(chunks, None)
        except TimeoutError:
            raise ApiError(408, f"No part of the request body arrived for {BODY_TIMEOUT_S:g} s.") from None
        if chunk is None:
            return
        yield chunk


async def _limited(request: Request, limit: int) -> AsyncIterator[bytes]:
    announced = request.headers.get("content-length", "")
    # The length of the text is checked first: int() refuses thousands of digits, and is slow for somewhat fewer.
    if announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > limit):
        raise ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
    received = 0
    try:
        async for chunk in request.stream():
            received += len(chunk)
            if received > limit:
                raise ApiError(413, f"The request body is larger than the limit of {limit} bytes.")
            yield chunk
    except ClientDisconnect:
        raise BadRequest("The client closed the connection before the end of the request body.") from None


async def _body(request: Request) -> bytes:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return b"".join([chunk async for chunk in _limited(request, MAX_BODY_BYTES)])
    except TimeoutError:
        raise ApiError(408, f"The request body did not arrive within {BODY_TIMEOUT_S:g} s.") from None


async def read_object(request: Request, *, expected: str, empty_is_object: bool = True) -> dict[str, Any]:
    """Read the body as a JSON object. ``expected`` names the format in messages.

    An empty body counts as ``{}``, as in Flink, unless ``empty_is_object`` is false.
    """
    raw = await _body(request)
    if not raw.strip():
        if empty_is_object:
            return {}
        raise BadRequest(f"Request did not match expected format {expected}: the body is empty.")
    try:
        document = parse_json(raw)
    except JsonRefused as error:
        raise BadRequest(f"Request did not match expected format {expected}: {error}") from None
    if not isinstance(document, dict):
        raise BadRequest(f"Request did not match expected format {expected}: the body must be a JSON object.")
    return document


async def whole_request(request: Request) -> None:
    """Wait until the ignored body of a request that makes a change has arrived completely.

    Otherwise a request that is broken after its head would be refused by the HTTP layer and still be carried out.
    """
    await _body(request)


class JsonRefused(ValueError):
    """The bytes are not acceptable JSON; the message says why and where, and repeats no more than a key."""


@dataclass(frozen=True, slots=True)
class _BadNumber:
    """Stands for a number that is refused once its place in the document is known."""

    problem: str


def parse_json(raw: bytes) -> Any:
    """Parse strictly, in time proportional to the length. Raises :class:`JsonRefused`."""
    text = ""
    try:
        text = raw.decode("utf-8")
        document = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=lambda name: _BadNumber(f"{name} is not a JSON number"),
            parse_float=_finite_float,
            parse_int=_integer,
        )
    except JsonRefused:
        raise
    except UnicodeDecodeError as error:
        raise JsonRefused(f"not UTF-8 at byte {error.start}") from None
    except RecursionError:
        raise _too_deep(_deepest_field(text)) from None
    except json.JSONDecodeError as error:
        raise JsonRefused(f"malformed JSON, {error.msg} at line {error.lineno} column {error.colno}") from None
    _check_values(document, ())
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    document = dict(pairs)
    if len(document) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonRefused(f"the key {twice[:100]!a} occurs twice")
    return document


def _finite_float(text: str) -> float | _BadNumber:
    value = float(text)
    return value if math.isfinite(value) else _BadNumber("a number is too large")


def _integer(text: str) -> int | _BadNumber:
    """Numbers of so many digits would take long to convert."""
    return int(text) if len(text) <= _MAX_DIGITS else _BadNumber("a number has too many digits")


def _too_deep(path: tuple[str, ...]) -> JsonRefused:
    return _refused(path, f"nested deeper than {MAX_DEPTH} levels")


def _refused(path: tuple[str, ...], problem: str) -> JsonRefused:
    place = ".".join(path)
    return JsonRefused(f"{problem}, in the field {place[:100]!a}" if place else problem)


def _deepest_field(text: str) -> tuple[str, ...]:
    """The field in which a document becomes too deep; its text is well-formed up to there."""
    depth, field = 0, ""
    for token in _TOKEN.finditer(text):
        match token[0][0]:
            case "[" | "{":
                depth += 1
            case "]" | "}":
                depth -= 1
            case _ if depth == 1:
                field = token[0][1:-1]
        if depth > MAX_DEPTH:
            break
    return (field,) if field else ()


def _check_values(document: Any, path: tuple[str, ...]) -> None:
    """Refuse bad numbers, lone surrogates, and arrays and objects that are nested too deep."""
    if isinstance(document, str):
        try:
            document.encode("utf-8")
        except UnicodeEncodeError:
            raise _refused(path, "a string holds a lone surrogate") from None
    elif isinstance(document, _BadNumber):
        raise _refused(path, document.problem)
    elif isinstance(document, dict | list):
        if len(path) == MAX_DEPTH:
            raise _too_deep(path)
        if isinstance(document, dict):
            for key, value in document.items():
                _check_values(key, (*path, key))
                _check_values(value, (*path, key))
        else:
            for number, value in enumerate(document):
                _check_values(value, (*path, str(number)))


PART_NAME = "jarfile"
DEFAULT_MAX_UPLOAD_BYTES = 100 * 1024 * 1024
_FRAMING_BYTES = 16 * 1024
_CHUNK_BYTES = 256 * 1024
_MAX_NAME_CHARS = 200
_ZIP_MAGIC = b"PK\x03\x04"


def display_name(raw: str | None) -> str:
    """The last segment of the client's file name. Raises 400 unless it ends in ``.py`` or ``.zip``."""
    name = re.split(r"[/\\]", raw or "")[-1]
    printable = name.isprintable() and 0 < len(name) <= _MAX_NAME_CHARS and not name.startswith(".")
    if not printable or not name.lower().endswith((".py", ".zip")):
        raise BadRequest(f"{PART_NAME}: the file name {echo(raw)} is not acceptable, it must end in .py or .zip")
    return name


async def receive_pipeline(request: Request, dispatcher: Dispatcher, max_bytes: int) -> StoredPipeline:
    """Parse the form, check the part and hand its bytes to the dispatcher."""
    if not request.headers.get("content-type", "").lower().startswith("multipart/form-data"):
        raise BadRequest(f"The upload must be multipart/form-data with one file in the part {PART_NAME!r}.")
    body = limited_stream(request, max_bytes + _FRAMING_BYTES)
    parser = MultiPartParser(request.headers, body, max_files=1, max_fields=4)  # type: ignore[arg-type]
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise BadRequest(f"Malformed multipart upload: {error.message}") from None
    except (KeyError, UnicodeDecodeError, LookupError, ValueError):
        raise BadRequest("Malformed multipart upload.") from None
    try:
        part = form.get(PART_NAME)
        if not isinstance(part, UploadFile):
            raise BadRequest(f"The upload has no file in the part {PART_NAME!r}.")
        name = display_name(part.filename)
        await _check_content(part, name)
        return await dispatcher.store_pipeline(name, _chunks(part))
    finally:
        await form.close()


async def _check_content(part: UploadFile, name: str) -> None:
    first = await part.read(len(_ZIP_MAGIC))
    await part.seek(0)
    if not first:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is empty")
    if name.lower().endswith(".zip") and first != _ZIP_MAGIC:
        raise BadRequest(f"{PART_NAME}: {echo(name)} is not a zip archive")


async def _chunks(part: UploadFile) -> AsyncIterator[bytes]:
    while chunk := await part.read(_CHUNK_BYTES):
        yield chunk


_MOST_SUBTASKS = 32767
HEX_ID_PATTERN = "^[0-9a-fA-F]{32}$"
OWNER_PATTERN = "^[A-Za-z0-9_][A-Za-z0-9._:@+-]{0,199}$"
_JOB, _VERTEX = "fa461ac280c9aa36bde4a060aa97618c", "f74362dd18da632fe7d708268d6f8693"
_TRIGGER = "3e4fc69c1d0a4bb0b1a4d1a2c3b4d5e6"


def _hex_id(alias: str, description: str, example: str) -> Any:
    return Path(alias=alias, description=description, pattern=HEX_ID_PATTERN, examples=[example])


_LOWER = AfterValidator(str.lower)


async def _dispatcher_of(request: Request) -> Dispatcher:
    """The application's dispatcher. A coroutine, because FastAPI runs a plain function in a thread per request."""
    dispatcher: Dispatcher = request.app.state.dispatcher
    return dispatcher


TheDispatcher = Annotated[Dispatcher, Depends(_dispatcher_of)]
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
    list[str] | None, Query(alias="failureLabelFilter", description="key:value; no failure has labels here")
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
        description="absolute path or URL; without it the configured savepoint directory",
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
