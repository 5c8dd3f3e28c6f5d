"""Request bodies as pydantic models: the kinds of fields, their spellings, and the messages for refused values.

A body is first read within its limits and parsed strictly (``json_body``). A field that is absent or null gets its
default; it may be given under any of its spellings, which must agree. An error is a 400 that names the field, the value
and what is allowed. Unknown fields are ignored, as in Flink, except in closed bodies.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
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

from ckpt_runtime.rest.request_body import HEX_ID_PATTERN, OWNER_PATTERN, read_object
from ckpt_runtime.rest.responses import BadRequest, echo

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
                "empty", "The body names no field to change; it may hold {names}.", {"names": names}
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
