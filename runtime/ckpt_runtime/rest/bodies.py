"""Request bodies: JSON read within limits, pydantic models with the messages for refused values, uploaded pipelines.

JSON is read more strictly than by the standard library: no NaN, Infinity or overflowing number, no duplicate key, no
lone surrogate, no deep nesting. An upload is one multipart part called ``jarfile``, a ``.py`` or a ``.zip``; the
client's file name is only displayed and never used as a path. Every refusal is a 4xx :class:`ApiError`.

A field of a model that is absent or null gets its default; it may be given under any of its spellings, which must
agree. An error is a 400 that names the field, the value and what is allowed. Unknown fields are ignored, as in Flink,
except in closed bodies.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

from annotated_types import GroupedMetadata
from fastapi import Depends, Request
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
from starlette.datastructures import UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from ckpt_runtime.jobmaster.dispatcher import Dispatcher
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.rest.parameters import HEX_ID_PATTERN, OWNER_PATTERN
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
    """The bytes are not acceptable JSON; the message names the reason and the position, and repeats at most a key."""


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
    str,
    StringConstraints(strict=True, pattern=OWNER_PATTERN),
    _said("it must be 1 to 200 letters, digits and ._:@+-"),
]
Texts = Annotated[tuple[StrictStr, ...], _said("it must be a list of strings"), AfterValidator(_texts)]
Options = Annotated[dict[str, Annotated[str, BeforeValidator(_option)]], BeforeValidator(_options)]


def _option_or_null(value: object) -> str | None:
    return None if value is None else _option(value)


OptionsPatch = Annotated[dict[str, Annotated[str | None, BeforeValidator(_option_or_null)]], BeforeValidator(_options)]
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
