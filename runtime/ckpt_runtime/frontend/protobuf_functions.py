"""Spark's ``from_protobuf`` and ``to_protobuf``: Arrow functions around Google's package protobuf.

Both need the descriptors of the message, as ``protoc --include_imports --descriptor_set_out`` writes them. Types and
options are those of Spark's package. With a Schema Registry, messages begin with the header of Confluent's format,
whose indexes say which message of the registered file it is.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from ckpt_runtime.expressions.types import SparkType
from ckpt_runtime.frontend.message_functions import (
    HEADER_BYTES,
    MODE,
    REGISTRY_URL,
    REGISTRY_USER,
    WRITER_OPTIONS,
    Decoder,
    MessageFunction,
    RegisteredSchema,
    UnknownSchemaError,
    WrittenSchema,
    by_name,
    checked_options,
    literals_of,
    registered_schema,
)
from ckpt_runtime.graph.errors import PlanError

NAMES = ("from_protobuf", "to_protobuf")
_DEPTH, _DEFAULTS, _ENUMS = "recursive.fields.max.depth", "emit.default.values", "enums.as.ints"
_UNSIGNED, _WRAPPERS, _EMPTY = "upcast.unsigned.ints", "unwrap.primitive.wrapper.types", "retain.empty.message.types"
_ANY = "convert.any.fields.to.json"
_FLAGS = (_DEFAULTS, _ENUMS, _UNSIGNED, _WRAPPERS, _EMPTY)
_REFUSED = {_ANY: "its texts are those of Java's printer; without it, an Any is a struct of type_url and value"}
_DEEPEST = 10
_DUMMY = "__dummy_field_in_empty_struct"

_WRAPPED = {
    f"google.protobuf.{name}Value"
    for name in ("Bool", "Int32", "UInt32", "Int64", "UInt64", "Float", "Double", "String", "Bytes")
}
_TIMESTAMP, _DURATION = "google.protobuf.Timestamp", "google.protobuf.Duration"
_WELL_KNOWN = "any api duration empty field_mask source_context struct timestamp type wrappers"

Convert = Callable[[Any], Any]


class _Kind(NamedTuple):
    """A Spark type, and how a value of a message becomes one for Arrow; None if it is one already."""

    spark: SparkType
    convert: Convert | None = None


def _pool_of(function: str, descriptors: bytes) -> Any:
    """The descriptors of a set by their names, with those that Google's package has, and the files of the set.

    Raises PlanError.
    """
    try:
        from google.protobuf import descriptor_pb2, descriptor_pool
        from google.protobuf.message import DecodeError
    except ImportError:
        problem = "needs protobuf where programs are planned and run: pip install 'ckpt-runtime[protobuf]'"
        raise PlanError(function, problem) from None
    from importlib import import_module

    try:
        given = {file.name: file for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file}
    except DecodeError:
        raise PlanError(function, "its descriptors are no FileDescriptorSet of protoc") from None
    own = list(given)
    for name in _WELL_KNOWN.split():
        path = f"google/protobuf/{name}.proto"
        if path not in given:
            known = import_module(f"google.protobuf.{name}_pb2").DESCRIPTOR.serialized_pb
            given[path] = descriptor_pb2.FileDescriptorProto.FromString(known)
    pool, added = descriptor_pool.DescriptorPool(), set[str]()

    def add(name: str) -> None:
        if name in added:
            return
        added.add(name)
        if name not in given:
            problem = f"its descriptors lack the imported file {name!r}; give protoc the option --include_imports"
            raise PlanError(function, problem)
        for other in given[name].dependency:
            add(other)
        try:
            pool.Add(given[name])
        except TypeError as error:
            raise PlanError(function, f"the descriptors of {name!r} cannot be used: {error}") from None

    for name in given:
        add(name)
    return pool, [pool.FindFileByName(name) for name in own]


@lru_cache(16)
def _described(function: str, message: str, descriptors: bytes) -> Any:
    """The descriptor of a message, named with or without its package. Raises PlanError."""
    pool, files = _pool_of(function, descriptors)
    found = [each for file in files for name, each in file.message_types_by_name.items() if name == message]
    try:
        return pool.FindMessageTypeByName(message)
    except KeyError:
        if len(found) == 1:
            return found[0]
    problem = "there are several of that name: give its package too" if found else "the descriptors do not have it"
    raise PlanError(function, f"message {message!r}: {problem}")


class _Types:
    """The Spark types of messages. Raises PlanError for one that contains itself, unless an option allows it."""

    def __init__(self, function: str, options: Mapping[str, str]) -> None:
        self._function = function
        self._flags = {key: _flag(function, key, options.get(key, "false")) for key in _FLAGS}
        text = options.get(_DEPTH, "-1")
        if text != "-1" and not (text.isdecimal() and 1 <= int(text) <= _DEEPEST):
            raise PlanError(function, f"{_DEPTH} {text!r} is not -1 or a number from 1 to {_DEEPEST}")
        self._depth = int(text)

    def of_message(self, message: Any, depths: Mapping[str, int] | None = None) -> _Kind | None:
        """The type of a message; None if nothing of it is left."""
        depths = {**(depths or {}), message.full_name: (depths or {}).get(message.full_name, 0) + 1}
        kinds = {field: self._of_field(field, depths) for field in message.fields}
        kept = {field: kind for field, kind in kinds.items() if kind is not None}
        if not kept and not message.fields and self._flags[_EMPTY]:
            dummy = {"name": _DUMMY, "type": "string", "nullable": True, "metadata": {}}
            return _Kind({"type": "struct", "fields": [dummy]}, lambda _: {})
        if not kept:
            return None
        fields = []
        for field, kind in kept.items():
            may_be_null = not (field.is_required or field.is_repeated)
            fields.append({"name": field.name, "type": kind.spark, "nullable": may_be_null, "metadata": {}})
        readers = [(field.name, self._reader(field, kind.convert)) for field, kind in kept.items()]
        return _Kind({"type": "struct", "fields": fields}, lambda value: {name: read(value) for name, read in readers})

    def _reader(self, field: Any, convert: Convert | None) -> Convert:
        """Reads a field; it is null if it is absent, unless it has a default value of its own."""
        name = field.name
        always = field.is_repeated or field.has_default_value or (not field.has_presence and self._flags[_DEFAULTS])
        present: Convert = _always if always else _presence_of(field)
        of_value = convert or _same
        return lambda message: of_value(getattr(message, name)) if present(message) else None

    def _of_field(self, field: Any, depths: Mapping[str, int]) -> _Kind | None:
        message = field.message_type
        if message is not None and message.GetOptions().map_entry:
            key, value = (self._of_value(message.fields_by_name[name], depths) for name in ("key", "value"))
            if key is None or value is None:
                return None
            kind: SparkType = {
                "type": "map", "keyType": key.spark, "valueType": value.spark, "valueContainsNull": False,
            }  # fmt: skip
            of_key, of_value = key.convert or _same, value.convert or _same
            return _Kind(kind, lambda entries: [(of_key(name), of_value(entries[name])) for name in entries])
        found = self._of_value(field, depths)
        if found is None or not field.is_repeated:
            return found
        array: SparkType = {"type": "array", "elementType": found.spark, "containsNull": False}
        convert = found.convert or _same
        return _Kind(array, lambda values: [convert(value) for value in values])

    def _of_value(self, field: Any, depths: Mapping[str, int]) -> _Kind | None:
        if field.enum_type is not None:
            return _Kind("integer") if self._flags[_ENUMS] else _Kind("string", _enum_names(field.enum_type))
        if field.message_type is None:
            return self._of_scalar(field)
        name = field.message_type.full_name
        if name == _TIMESTAMP:
            return _Kind("timestamp", lambda value: value.seconds * 1_000_000 + _truncated(value.nanos))
        if name == _DURATION:
            return _Kind("interval day to second", lambda value: value.seconds * 1_000_000 + _truncated(value.nanos))
        if name in _WRAPPED and self._flags[_WRAPPERS]:
            inner = self._of_scalar(field.message_type.fields_by_name["value"])
            convert = inner.convert or _same
            return _Kind(inner.spark, lambda value: convert(value.value))
        depth = depths.get(name, 0)
        if depth and self._depth < 1:
            problem = f"message {name} contains itself: set {_DEPTH} to how deep it may be read"
            raise PlanError(self._function, problem)
        return None if depth and depth >= self._depth else self.of_message(field.message_type, depths)

    def _of_scalar(self, field: Any) -> _Kind:
        kind = _scalars()[field.type]
        if kind == "uint32":
            return _Kind("long") if self._flags[_UNSIGNED] else _Kind("integer", lambda value: _signed(value, 32))
        if kind == "uint64":
            return _Kind("decimal(20,0)") if self._flags[_UNSIGNED] else _Kind("long", lambda value: _signed(value, 64))
        return _Kind(kind)


def _presence_of(field: Any) -> Callable[[Any], bool]:
    if field.has_presence:
        return lambda message: bool(message.HasField(field.name))
    default = field.default_value
    return lambda message: bool(getattr(message, field.name) != default or str(getattr(message, field.name)) == "-0.0")


def _enum_names(enum: Any) -> Convert:
    names = {value.number: value.name for value in reversed(enum.values)}
    return lambda number: names.get(number) or f"UNKNOWN_ENUM_VALUE_{enum.name}_{number}"


def _same(value: Any) -> Any:
    return value


def _always(_: Any) -> bool:
    return True


def _signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def _truncated(nanos: int) -> int:
    return int(nanos / 1000)


@lru_cache
def _scalars() -> dict[int, str]:
    """Spark's types of the kinds of fields, but unsigned ones by their own names."""
    from google.protobuf.descriptor import FieldDescriptor as F

    return {
        F.TYPE_BOOL: "boolean",
        F.TYPE_INT32: "integer",
        F.TYPE_SINT32: "integer",
        F.TYPE_SFIXED32: "integer",
        F.TYPE_UINT32: "uint32",
        F.TYPE_FIXED32: "uint32",
        F.TYPE_INT64: "long",
        F.TYPE_SINT64: "long",
        F.TYPE_SFIXED64: "long",
        F.TYPE_UINT64: "uint64",
        F.TYPE_FIXED64: "uint64",
        F.TYPE_FLOAT: "float",
        F.TYPE_DOUBLE: "double",
        F.TYPE_STRING: "string",
        F.TYPE_BYTES: "binary",
    }


def _flag(function: str, key: str, text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise PlanError(function, f"{key} {text!r} is not true or false")
    return text.lower() == "true"


class FromProtobuf(Decoder):
    """Decodes messages."""

    name = "from_protobuf"

    def __init__(self, message: str, descriptors: bytes, options: Mapping[str, str]) -> None:
        known = (MODE, _DEPTH, *_FLAGS, REGISTRY_URL, REGISTRY_USER)
        given = {key: value for key, value in options.items() if (key.lower(), value.lower()) != (_ANY, "false")}
        given = checked_options(self.name, given, known, _REFUSED)
        super().__init__(given)
        self._message = _described(self.name, message, descriptors)
        from google.protobuf import message_factory, unknown_fields

        kind = _Types(self.name, given).of_message(self._message)
        if kind is None:
            raise PlanError(self.name, f"message {message!r} has no fields; set {_EMPTY} to keep it")
        assert kind.convert is not None
        self.result, self._convert = kind.spark, kind.convert
        self._class = message_factory.GetMessageClass(self._message)
        self._unknown = unknown_fields.UnknownFieldSet
        self._numbers = frozenset(self._message.fields_by_number)

    def value(self, message: bytes) -> Any:
        if self.registry is not None:
            message = message[self._header(message) :]
        read = self._class.FromString(message)
        for field in self._unknown(read):
            if field.field_number in self._numbers:
                raise ValueError(f"field {field.field_number} is written as another type than that of the descriptor")
        return self._convert(read)

    def _header(self, message: bytes) -> int:
        """The length of the header. Raises UnknownSchemaError if it names another message."""
        assert self.registry is not None
        text = self.registry.schema_of(message, "PROTOBUF")[-1]
        indexes, length = message_indexes(message)
        found = _written(text, tuple(indexes), self._message)
        if found != self._message.full_name:
            raise UnknownSchemaError(f"it is a message {found or 'of unknown type'}, not {self._message.full_name}")
        return length


@lru_cache(1024)
def _written(text: str, indexes: tuple[int, ...], expected: Any) -> str | None:
    """The full name of the message with those indexes in a registered file; None if there is none.

    The registry gives a file as a serialized descriptor. One that gives source text instead has to have the file that
    the program gave.
    """
    from google.protobuf import descriptor_pb2
    from google.protobuf.message import DecodeError

    file = descriptor_pb2.FileDescriptorProto()
    try:
        file.ParseFromString(base64.b64decode(text, validate=True))
    except (binascii.Error, DecodeError):
        expected.file.CopyToProto(file)
    names, there = [file.package] if file.package else [], file.message_type
    for index in indexes:
        if not 0 <= index < len(there):
            return None
        names.append(there[index].name)
        there = there[index].nested_type
    return ".".join(names)


def message_indexes(message: bytes) -> tuple[list[int], int]:
    """The indexes behind the id of a message in Confluent's format, and where the message itself begins.

    They are zigzag numbers: how many there are, then each. A single zero stands for the first message of the file.
    Raises UnknownSchemaError.
    """
    at = HEADER_BYTES

    def number() -> int:
        nonlocal at
        value = shift = 0
        while True:
            if at >= len(message) or shift > 63:
                raise UnknownSchemaError("the message does not have the indexes of its type behind the id")
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return (value >> 1) ^ -(value & 1)

    count = number()
    if count < 0 or count > len(message):
        raise UnknownSchemaError("the message does not have the indexes of its type behind the id")
    return [number() for _ in range(count)] or [0], at


class ToProtobuf(MessageFunction):
    """Encodes structs as messages."""

    name = "to_protobuf"
    result = "binary"

    def __init__(self, message: str, descriptors: bytes, options: Mapping[str, str]) -> None:
        known = (MODE, _DEPTH, *_FLAGS, *WRITER_OPTIONS)
        # Options that say how messages are read change nothing in what is written, as in Spark.
        given = {key: value for key, value in options.items() if (key.lower(), value.lower()) != (_ANY, "false")}
        given = checked_options(self.name, given, known, _REFUSED)
        _Types(self.name, given)
        self._registered = registered_schema(self.name, given)
        self._message = _described(self.name, message, descriptors)
        self._indexes = _indexes_of(self._message)
        from google.protobuf import message_factory

        self._class = message_factory.GetMessageClass(self._message)

    def check(self, argument: SparkType) -> None:
        if not isinstance(argument, dict) or argument["type"] != "struct":
            raise PlanError(self.name, f"its argument is {by_name(argument)}, not a struct")
        self._check_struct(self._message, argument, "")

    def _check_struct(self, message: Any, given: Mapping[str, Any], path: str) -> None:
        columns = {field["name"]: field["type"] for field in given["fields"] if field["name"] != _DUMMY}
        for name, kind in columns.items():
            field = message.fields_by_name.get(name)
            if field is None:
                raise PlanError(self.name, f"message {message.full_name} has no field {path}{name}")
            self._check_field(field, kind, path + name)
        for field in message.fields:
            if field.is_required and field.name not in columns:
                raise PlanError(self.name, f"the column has no field {path}{field.name}, which the message requires")

    def _check_field(self, field: Any, given: SparkType, path: str) -> None:
        if given == "void":
            return
        message, kind = field.message_type, given["type"] if isinstance(given, dict) else given
        if message is not None and message.GetOptions().map_entry:
            self._check_kind(kind == "map", path, "map", given)
            for part, name in (("keyType", "key"), ("valueType", "value")):
                self._check_value(message.fields_by_name[name], given[part], f"{path}.{name}")  # type: ignore[index]
        elif field.is_repeated:
            self._check_kind(kind == "array", path, "array", given)
            self._check_value(field, given["elementType"], f"{path}.element")  # type: ignore[index]
        else:
            self._check_value(field, given, path)

    def _check_value(self, field: Any, given: SparkType, path: str) -> None:
        message = field.message_type
        if field.enum_type is not None:
            self._check_kind(given in ("string", "integer"), path, "string or integer", given)
        elif message is None:
            self._check_scalar(field, given, path)
        elif message.full_name == _TIMESTAMP:
            self._check_kind(given == "timestamp", path, "timestamp", given)
        elif message.full_name == _DURATION:
            self._check_kind(str(given).startswith("interval day"), path, "interval day to second", given)
        elif message.full_name in _WRAPPED and not isinstance(given, dict):
            self._check_scalar(message.fields_by_name["value"], given, path)
        else:
            self._check_kind(isinstance(given, dict) and given["type"] == "struct", path, "struct", given)
            self._check_struct(message, given, f"{path}.")  # type: ignore[arg-type]

    def _check_scalar(self, field: Any, given: SparkType, path: str) -> None:
        kind = _scalars()[field.type]
        allowed = {"uint32": ("integer", "long"), "uint64": ("long", "decimal(20,0)")}.get(kind, (kind,))
        self._check_kind(given in allowed, path, " or ".join(allowed), given)

    def _check_kind(self, right: bool, path: str, wanted: str, given: SparkType) -> None:
        if not right:
            raise PlanError(self.name, f"field {path} takes {wanted}, and the column is {by_name(given)}: cast it")

    def __call__(self, values: pa.Array) -> pa.Array:
        rows = values.to_pylist(maps_as_pydicts="strict")
        return pa.array([None if row is None else self._encoded(row) for row in rows], pa.binary())

    def _encoded(self, row: Mapping[str, Any]) -> bytes:
        message = self._class()
        _fill(message, row)
        written = bytes(message.SerializeToString(deterministic=True))
        registered = self._registered
        if registered is None:
            return written
        return registered.header(lambda: _file_to_register(self._message.file, registered)) + self._indexes + written


def _file_to_register(file: Any, registered: RegisteredSchema) -> WrittenSchema:
    """A file as the registry takes it: its descriptor in base64, and the files that it imports, which have subjects of
    their names. The registry knows those of Google."""
    others = [other for other in file.dependencies if not other.name.startswith("google/protobuf/")]
    references = [registered.reference(other.name, _file_to_register(other, registered)) for other in others]
    return WrittenSchema(base64.b64encode(file.serialized_pb).decode(), "PROTOBUF", references)


def _indexes_of(message: Any) -> bytes:
    """What :func:`message_indexes` reads: the place of a message in its file."""
    indexes: list[int] = []
    while message is not None:
        around = message.containing_type
        siblings = (message.file.message_types_by_name if around is None else around.nested_types_by_name).values()
        indexes.insert(0, [each.name for each in siblings].index(message.name))
        message = around
    numbers = [0] if indexes == [0] else [len(indexes), *indexes]
    return b"".join(_zigzag(number) for number in numbers)


def _zigzag(number: int) -> bytes:
    """A number that is not negative, as a zigzag varint."""
    value, written = number << 1, bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*written, value])


def _fill(message: Any, row: Mapping[str, Any]) -> None:
    """Sets the fields of a message. Raises ValueError for a value that it cannot have."""
    for name, value in row.items():
        field = message.DESCRIPTOR.fields_by_name.get(name)
        if value is None or field is None:
            if field is not None and field.is_required:
                raise ValueError(f"to_protobuf: field {name} is null, and the message requires it")
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(getattr(message, name), field, value)
        elif field.is_repeated:
            _fill_array(getattr(message, name), field, value)
        elif field.message_type is not None:
            getattr(message, name).SetInParent()
            _fill_value(getattr(message, name), value)
        else:
            setattr(message, name, _scalar(field, value))


def _fill_map(entries: Any, field: Any, values: Mapping[Any, Any]) -> None:
    inner = field.message_type.fields_by_name["value"]
    for key, value in values.items():
        if value is None:
            raise ValueError(f"to_protobuf: a value of the map {field.name} is null")
        if inner.message_type is not None:
            _fill_value(entries[key], value)
        else:
            entries[key] = _scalar(inner, value)


def _fill_array(elements: Any, field: Any, values: Iterable[Any]) -> None:
    for value in values:
        if value is None:
            raise ValueError(f"to_protobuf: an element of {field.name} is null")
        if field.message_type is not None:
            _fill_value(elements.add(), value)
        else:
            elements.append(_scalar(field, value))


def _fill_value(message: Any, value: Any) -> None:
    """Sets a message of a field to a struct, a time, an interval or the value that it wraps."""
    if isinstance(value, Mapping):
        _fill(message, value)
    elif message.DESCRIPTOR.full_name == _TIMESTAMP:
        message.FromDatetime(value)
    elif message.DESCRIPTOR.full_name == _DURATION:
        message.FromTimedelta(value)
    else:
        message.value = _scalar(message.DESCRIPTOR.fields_by_name["value"], value)


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is not None:
        if isinstance(value, int):
            return value
        if value not in field.enum_type.values_by_name:
            names = ", ".join(each.name for each in field.enum_type.values)
            raise ValueError(f"to_protobuf: {value!r} of field {field.name} is not one of {names}")
        return field.enum_type.values_by_name[value].number
    kind = _scalars()[field.type]
    if kind in ("uint32", "uint64"):
        return int(value) & ((1 << int(kind[4:])) - 1)
    return value


def function_of(call: Any) -> MessageFunction:
    """The function that a call of ``from_protobuf`` or ``to_protobuf`` in a plan stands for. Raises PlanError."""
    name = call.function_name.lower()
    given, options = literals_of(call)
    if len(given) != 2 or not isinstance(given[1], bytes):
        raise PlanError(
            name,
            "the engine has no Java classes: give the descriptors of the message, as descFilePath or "
            "binaryDescriptorSet, which protoc --include_imports --descriptor_set_out writes",
        )
    return _made(name, str(given[0]), given[1], tuple(options.items()))


@lru_cache
def _made(name: str, message: str, descriptors: bytes, options: tuple[tuple[str, str], ...]) -> MessageFunction:
    """One object for all equal calls, which a plan then calls once for equal columns."""
    made = FromProtobuf if name == "from_protobuf" else ToProtobuf
    return made(message, descriptors, dict(options))
