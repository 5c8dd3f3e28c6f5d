"""What ``from_avro``, ``to_avro``, ``from_protobuf`` and ``to_protobuf`` share: their calls, options and bad messages.

Spark's packages for these functions are not needed. The analyzer in Spark gets a Python function of the result's type
in place of each call, and the operators call it with columns of Arrow. Schemas and options have to be literals.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import pyarrow as pa

from ckpt_runtime.expressions.types import SparkType, arrow_type
from ckpt_runtime.frontend.schema_registry import RegisteredSchema, RegistryError, SchemaRegistry
from ckpt_runtime.graph.errors import PlanError

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
