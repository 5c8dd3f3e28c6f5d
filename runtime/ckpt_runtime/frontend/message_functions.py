"""What ``from_avro``, ``to_avro``, ``from_protobuf`` and ``to_protobuf`` share: calls, options, schemas, bad messages.

Spark's packages for these functions are not needed. The analyzer in Spark gets a Python function of the result's type
in place of each call, and the operators call it with columns of Arrow. Schemas and options have to be literals.

A Schema Registry of Confluent's API gives schemas by the ids that messages of Kafka carry, and registers those of
messages that are written. Schemas never change, so each is requested once; a repeated registration gives the same id.
If the registry does not answer, the call is repeated for a while, and fails then. Credentials are in no log line and no
error.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar
from urllib.parse import quote

import msgspec
import pyarrow as pa

from ckpt_runtime.expressions.types import ServiceError, SparkType, arrow_type
from ckpt_runtime.failure_report import printable
from ckpt_runtime.graph.errors import PlanError

T = TypeVar("T")

_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 5, 0.5, 10.0
_MOST_BYTES = 1 << 20
_MOST_REASON_CHARS = 500
_NOT_FOUND, _CONFLICT = 404, 409
_CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
HEADER_BYTES = 5
"""The wire format: a zero byte, the id of the schema as a big-endian number of four bytes, the message."""


class UnknownSchemaError(ValueError):
    """A message does not have the header of the wire format, or the registry has no schema of its id."""


class RegistryError(ServiceError):
    """The registry did not answer, or refused to."""


class Reference(msgspec.Struct):
    """Another schema that a schema imports as ``name``."""

    subject: str
    version: int
    name: str = ""


class Registered(msgspec.Struct):
    """A schema in the registry; the answer to a registration has no ``version``, that to a look-up has."""

    id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    version: int | None = None


class WrittenSchema(msgspec.Struct, frozen=True):
    """A schema as it is registered. ``kind`` is AVRO or PROTOBUF."""

    text: str
    kind: str
    references: Sequence[Reference] = ()


class _Refusal(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct, rename="camel"):
    schema: str
    schema_type: str = "AVRO"
    references: list[Reference] = []


class SchemaRegistry:
    """A client of one registry. ``user_info`` is ``user:password`` for basic authentication, or None."""

    def __init__(self, url: str, user_info: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._user_info = user_info
        self._schemas: dict[int, _Answer] = {}
        self._texts: dict[int, tuple[str, ...]] = {}

    def schema_of(self, message: bytes, kind: str) -> tuple[str, ...]:
        """The schema with which a message was written, behind those that it refers to; ``kind`` is AVRO or PROTOBUF.

        Raises UnknownSchemaError, and RegistryError.
        """
        if len(message) < HEADER_BYTES or message[0]:
            raise UnknownSchemaError("the message does not begin with a zero byte and the id of its schema")
        number = int.from_bytes(message[1:HEADER_BYTES], "big")
        if number not in self._schemas:
            query = "?format=serialized" if kind == "PROTOBUF" else ""
            self._schemas[number] = self._asked(f"schemas/ids/{number}{query}", f"schema {number}")
        found = self._schemas[number]
        if found.schema_type != kind:
            raise UnknownSchemaError(
                f"schema {number} of the Schema Registry is of type {found.schema_type}, not {kind}"
            )
        if number not in self._texts:
            # Messages of Protocol Buffers are read without the schemas that theirs refers to.
            others = self._referred(found, set()) if kind == "AVRO" else []
            self._texts[number] = (*others, found.schema)
        return self._texts[number]

    def _referred(self, answer: _Answer, known: set[tuple[str, int]]) -> list[str]:
        """The schemas that a schema refers to, each behind those to which it refers itself."""
        found: list[str] = []
        for reference in answer.references:
            key = (reference.subject, reference.version)
            if key in known:
                continue
            known.add(key)
            subject, what = quote(reference.subject, safe=""), f"version {reference.version} of {reference.subject!r}"
            other = self._asked(f"subjects/{subject}/versions/{reference.version}", what)
            found += [*self._referred(other, known), other.schema]
        return found

    def registered(self, subject: str, schema: WrittenSchema, *, register: bool) -> Registered:
        """Returns a schema in a subject. Without ``register``, it has to be there.

        Raises RegistryError if it is not, or if the registry refuses it, as it does for one that is incompatible with
        earlier versions.
        """
        given: dict[str, Any] = {"schema": schema.text}
        if schema.kind != "AVRO":
            given["schemaType"] = schema.kind
        if schema.references:
            given["references"] = list(schema.references)
        path = f"subjects/{quote(subject, safe='')}"
        what = f"the schema of subject {subject!r}"
        answer = self._answer(f"{path}/versions" if register else path, what, given)
        if answer.is_success:
            return self._decoded(answer.content, what, Registered)
        problem = self._reason_of(answer.content) or f"status {answer.status_code}"
        advice = {
            _NOT_FOUND: "; register it, or let auto.register.schemas do it",
            _CONFLICT: "; change the schema, or the compatibility of the subject",
        }.get(answer.status_code, "")
        raise RegistryError(f"the Schema Registry at {self._url} refused {what}: {problem}{advice}")

    @staticmethod
    def _reason_of(content: bytes) -> str:
        try:
            return printable(msgspec.json.decode(content, type=_Refusal).message, _MOST_REASON_CHARS)
        except msgspec.DecodeError:
            return ""

    def _asked(self, path: str, what: str) -> _Answer:
        answer = self._answer(path, what)
        if answer.status_code == _NOT_FOUND:
            raise UnknownSchemaError(f"the Schema Registry has no {what}")
        if not answer.is_success:
            raise self._unread(what, f"status {answer.status_code}")
        return self._decoded(answer.content, what, _Answer)

    def _answer(self, path: str, what: str, body: Any = None) -> Any:
        """Returns an answer that is no error of the server; asks again for a while before it raises RegistryError."""
        import httpx

        auth = None
        if self._user_info is not None:
            user, _, password = self._user_info.partition(":")
            auth = httpx.BasicAuth(user, password)
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            method, headers = ("GET", {}) if body is None else ("POST", {"content-type": _CONTENT_TYPE})
            content = None if body is None else msgspec.json.encode(body)
            try:
                answer = httpx.request(
                    method, f"{self._url}/{path}", auth=auth, timeout=_TIMEOUT_S, headers=headers, content=content
                )
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if not answer.is_server_error:
                return answer
            problem = f"status {answer.status_code}"
        if body is None:
            raise self._unread(what, problem)
        raise RegistryError(f"{what} cannot be registered at {self._url}: {problem}")

    def _unread(self, what: str, problem: str) -> RegistryError:
        return RegistryError(f"{what} cannot be read from the Schema Registry at {self._url}: {problem}")

    def _decoded(self, content: bytes, what: str, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content[: _MOST_BYTES + 1], type=kind)
        except msgspec.DecodeError as error:
            raise RegistryError(f"the Schema Registry at {self._url} gave no {what}: {error}") from None


class RegisteredSchema:
    """The schema of a writer in a subject: what :func:`registered_schema` makes of options.

    With ``register``, schemas are registered before the first message; otherwise they have to be there.
    """

    def __init__(self, registry: SchemaRegistry, subject: str, *, register: bool) -> None:
        self._registry = registry
        self._subject = subject
        self._register = register
        self._header: bytes | None = None

    def header(self, schema: Callable[[], WrittenSchema]) -> bytes:
        """The zero byte and the id of a schema, which is always the same. Raises RegistryError."""
        if self._header is None:
            found = self._registry.registered(self._subject, schema(), register=self._register)
            self._header = b"\0" + found.id.to_bytes(4, "big")
        return self._header

    def reference(self, name: str, schema: WrittenSchema) -> Reference:
        """Refers to another schema, whose subject is its name. Raises RegistryError."""
        if self._register:
            self._registry.registered(name, schema, register=True)
        found = self._registry.registered(name, schema, register=False)
        return Reference(name, found.version or 1, name)


MODE = "mode"
REGISTRY_URL, REGISTRY_USER = "schema.registry.url", "schema.registry.basic.auth.user.info"
SUBJECT, AUTO_REGISTER = "schema.registry.subject", "auto.register.schemas"
WRITER_OPTIONS = (REGISTRY_URL, REGISTRY_USER, SUBJECT, AUTO_REGISTER)
"""The options of a function that writes messages with the header of a Schema Registry."""


class MessageFunction(ABC):
    """A function over Arrow arrays; ``result`` is the Spark type of its result."""

    name: str
    result: SparkType

    @abstractmethod
    def check(self, argument: SparkType) -> None:
        """Raises PlanError for an argument of a type that the function does not take."""

    @abstractmethod
    def __call__(self, values: pa.Array) -> pa.Array:
        """Returns the results for the values of a column."""


class Decoder(MessageFunction):
    """A function that reads messages. A malformed one fails, or gives :attr:`malformed` in mode PERMISSIVE."""

    malformed: Any = None

    def __init__(self, options: Mapping[str, str]) -> None:
        """``options`` are those of :func:`checked_options`."""
        mode = options.get(MODE, "FAILFAST").upper()
        if mode not in ("FAILFAST", "PERMISSIVE"):
            raise PlanError(self.name, f"mode {options[MODE]!r} is not FAILFAST or PERMISSIVE, as in Spark")
        self.permissive = mode == "PERMISSIVE"
        self.registry = _registry_of(self.name, options)

    @abstractmethod
    def value(self, message: bytes) -> Any:
        """Returns what a message stands for, for Arrow. Raises RegistryError, and any error for a malformed one."""

    def check(self, argument: SparkType) -> None:
        if argument != "binary":
            raise PlanError(self.name, f"its argument is {argument}, not binary")

    def __call__(self, values: pa.Array) -> pa.Array:
        return pa.array(self._decoded(values.to_pylist()), arrow_type(self.result))

    def _decoded(self, messages: Iterable[bytes | None]) -> list[Any]:
        found = []
        for message in messages:
            try:
                found.append(None if message is None else self.value(message))
            except RegistryError:
                raise
            except Exception as error:  # the libraries raise several kinds
                if not self.permissive:
                    raise ValueError(
                        f"{self.name}: a message of {len(message or b'')} bytes is malformed ({type(error).__name__}: "
                        f"{error}); in mode PERMISSIVE it would be null"
                    ) from error
                found.append(self.malformed)
        return found


def registered_schema(function: str, options: Mapping[str, str]) -> RegisteredSchema | None:
    """What the options of a writer say of a Schema Registry; None if they name none. Raises PlanError."""
    registry = _registry_of(function, options)
    if registry is None:
        for option in (SUBJECT, AUTO_REGISTER):
            if option in options:
                raise PlanError(function, f"{option} needs {REGISTRY_URL}")
        return None
    if not options.get(SUBJECT):
        raise PlanError(
            function, f"{REGISTRY_URL} needs {SUBJECT}, such as orders-value for the values of topic orders"
        )
    register = options.get(AUTO_REGISTER, "true").lower()
    if register not in ("true", "false"):
        raise PlanError(function, f"{AUTO_REGISTER} {options[AUTO_REGISTER]!r} is not true or false")
    return RegisteredSchema(registry, options[SUBJECT], register=register == "true")


def _registry_of(function: str, options: Mapping[str, str]) -> SchemaRegistry | None:
    if REGISTRY_URL in options:
        return SchemaRegistry(options[REGISTRY_URL], options.get(REGISTRY_USER))
    if REGISTRY_USER in options:
        raise PlanError(function, f"{REGISTRY_USER} needs {REGISTRY_URL}")
    return None


def checked_options(
    function: str, options: Mapping[str, str], known: Iterable[str], refused: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The options by their names in small letters. ``refused`` says why options that Spark has are not supported.

    Raises PlanError for an option that is not known.
    """
    given = {key.lower(): value for key, value in options.items()}
    names = {name.lower() for name in known}
    for key in sorted(set(given) - names):
        reason = (refused or {}).get(key)
        *others, last = known
        why = reason or f"there are {', '.join(others)} and {last}"
        raise PlanError(function, f"the option {key!r} is not supported; {why}")
    return given


def nullable(spark: SparkType) -> SparkType:
    """The type with all of its parts nullable."""
    if not isinstance(spark, dict):
        return spark
    changed = {key: nullable(value) if isinstance(value, dict) else value for key, value in spark.items()}
    for key in ("nullable", "containsNull", "valueContainsNull"):
        if key in changed:
            changed[key] = True
    if "fields" in changed:
        changed["fields"] = [nullable(field) for field in changed["fields"]]
    return changed


def by_name(spark: SparkType) -> Any:
    """A type as texts, fields by their names, without their order and nullability."""
    if not isinstance(spark, dict):
        return spark
    match spark["type"]:
        case "struct":
            return {field["name"]: by_name(field["type"]) for field in spark["fields"]}
        case "array":
            return [by_name(spark["elementType"])]
        case "map":
            return (by_name(spark["keyType"]), by_name(spark["valueType"]))
    return spark


def literals_of(call: Any) -> tuple[list[str | bytes], dict[str, str]]:
    """The arguments of a call in a plan behind the first, without the last if it holds options, and the options.

    Raises PlanError for arguments that are no literals.
    """
    name = call.function_name.lower()
    given: list[str | bytes] = []
    options: list[Any] = []
    for argument in call.arguments[1:]:
        kind = argument.literal.WhichOneof("literal_type")
        if argument.WhichOneof("expr_type") == "unresolved_function":
            options = [_text(name, part) for part in argument.unresolved_function.arguments]
        elif kind == "binary":
            given.append(bytes(argument.literal.binary))
        else:
            given.append(_text(name, argument))
    return given, dict(zip(options[::2], options[1::2], strict=True))


def _text(function: str, expression: Any) -> str:
    if expression.literal.WhichOneof("literal_type") != "string":
        raise PlanError(function, "its schema and its options have to be texts, not columns")
    return str(expression.literal.string)
