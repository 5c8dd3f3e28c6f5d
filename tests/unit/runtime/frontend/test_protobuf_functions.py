"""``from_protobuf`` and ``to_protobuf`` beside messages of Google's package: types, options, bad messages, a registry.

The messages are those of modules that protoc has generated, and of a file of every kind of field.
"""

from __future__ import annotations

import base64
import sys
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    message_factory,
    source_context_pb2,
    struct_pb2,
    text_format,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)

from ckpt_runtime.expressions.types import arrow_type
from ckpt_runtime.frontend import message_functions, protobuf_functions
from ckpt_runtime.frontend.message_functions import RegistryError, by_name
from ckpt_runtime.frontend.protobuf_functions import FromProtobuf, ToProtobuf
from ckpt_runtime.graph.errors import PlanError
from tests.unit.runtime.frontend.test_avro_functions import framed, registry

FILE = """
name: "shop/order.proto" package: "shop" syntax: "proto3"
dependency: "google/protobuf/timestamp.proto" dependency: "google/protobuf/duration.proto"
dependency: "google/protobuf/wrappers.proto" dependency: "google/protobuf/any.proto"
enum_type { name: "Kind" value { name: "NEW" number: 0 } value { name: "OLD" number: 2 } }
message_type { name: "Empty" }
message_type {
  name: "Order"
  field { name: "id" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL }
  field { name: "small" number: 2 type: TYPE_UINT32 label: LABEL_OPTIONAL }
  field { name: "large" number: 3 type: TYPE_FIXED64 label: LABEL_OPTIONAL }
  field { name: "share" number: 4 type: TYPE_FLOAT label: LABEL_OPTIONAL }
  field { name: "paid" number: 5 type: TYPE_BOOL label: LABEL_OPTIONAL proto3_optional: true oneof_index: 1 }
  field { name: "raw" number: 6 type: TYPE_BYTES label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "text" number: 7 type: TYPE_STRING label: LABEL_OPTIONAL oneof_index: 0 }
  field { name: "kind" number: 8 type: TYPE_ENUM type_name: ".shop.Kind" label: LABEL_OPTIONAL }
  field { name: "at" number: 9 type: TYPE_MESSAGE type_name: ".google.protobuf.Timestamp" label: LABEL_OPTIONAL }
  field { name: "took" number: 10 type: TYPE_MESSAGE type_name: ".google.protobuf.Duration" label: LABEL_OPTIONAL }
  field { name: "limit" number: 11 type: TYPE_MESSAGE type_name: ".google.protobuf.UInt32Value" label: LABEL_OPTIONAL }
  field { name: "lines" number: 12 type: TYPE_MESSAGE type_name: ".shop.Order.Line" label: LABEL_REPEATED }
  field { name: "tags" number: 13 type: TYPE_MESSAGE type_name: ".shop.Order.TagsEntry" label: LABEL_REPEATED }
  field { name: "nothing" number: 14 type: TYPE_MESSAGE type_name: ".shop.Empty" label: LABEL_OPTIONAL }
  field { name: "more" number: 15 type: TYPE_MESSAGE type_name: ".google.protobuf.Any" label: LABEL_OPTIONAL }
  nested_type {
    name: "Line"
    field { name: "sku" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "counts" number: 2 type: TYPE_SINT32 label: LABEL_REPEATED }
  }
  nested_type {
    name: "TagsEntry" options { map_entry: true }
    field { name: "key" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
    field { name: "value" number: 2 type: TYPE_MESSAGE type_name: ".shop.Order.Line" label: LABEL_OPTIONAL }
  }
  oneof_decl { name: "payload" } oneof_decl { name: "_paid" }
}
message_type {
  name: "Node"
  field { name: "name" number: 1 type: TYPE_STRING label: LABEL_OPTIONAL }
  field { name: "below" number: 2 type: TYPE_MESSAGE type_name: ".shop.Node" label: LABEL_REPEATED }
}
"""
OLD = """
name: "old.proto" syntax: "proto2"
message_type {
  name: "Old"
  field { name: "id" number: 1 type: TYPE_INT32 label: LABEL_REQUIRED }
  field { name: "country" number: 2 type: TYPE_STRING label: LABEL_OPTIONAL default_value: "DE" }
}
"""


def described(*texts: str) -> bytes:
    """The bytes that protoc writes with --include_imports for files in the text format."""
    files = [text_format.Parse(text, descriptor_pb2.FileDescriptorProto()) for text in texts]
    known = [module.DESCRIPTOR for module in (timestamp_pb2, duration_pb2, wrappers_pb2, any_pb2)]
    imported = [descriptor_pb2.FileDescriptorProto.FromString(each.serialized_pb) for each in known]
    return descriptor_pb2.FileDescriptorSet(file=[*imported, *files]).SerializeToString()


def message_class(descriptors: bytes, name: str) -> Any:
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(descriptors).file:
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


DESCRIPTORS = described(FILE, OLD)
Order = message_class(DESCRIPTORS, "shop.Order")
AT = datetime(2026, 1, 2, 3, 4, 5, 678_901, UTC)


def full_order() -> Any:
    order = Order(id=-5, small=(1 << 32) - 1, large=(1 << 64) - 2, share=0.5, paid=False, text="é", kind=2)
    order.at.FromDatetime(AT)
    order.took.FromTimedelta(timedelta(days=-1, microseconds=7))
    order.limit.value = 3
    order.lines.add(sku="a", counts=[-1, 2])
    order.tags["x"].sku = "b"
    order.nothing.SetInParent()
    order.more.Pack(wrappers_pb2.Int32Value(value=4))
    return order


VALUE = {
    "id": -5,
    "small": -1,
    "large": -2,
    "share": 0.5,
    "paid": False,
    "raw": None,
    "text": "é",
    "kind": "OLD",
    "at": AT,
    "took": timedelta(days=-1, microseconds=7),
    "limit": {"value": 3},
    "lines": [{"sku": "a", "counts": [-1, 2]}],
    "tags": {"x": {"sku": "b", "counts": []}},
    "more": {"type_url": "type.googleapis.com/google.protobuf.Int32Value", "value": b"\x08\x04"},
}
ABSENT = {**dict.fromkeys(VALUE), "lines": [], "tags": {}}


def decoded(messages: list[Any], name: str = "Order", descriptors: bytes = DESCRIPTORS, /, **options: str) -> list[Any]:
    raw = [each if isinstance(each, bytes | None) else each.SerializeToString() for each in messages]
    return FromProtobuf(name, descriptors, options)(pa.array(raw, pa.binary())).to_pylist(maps_as_pydicts="strict")


@pytest.mark.row("ends.4")
def test_messages_of_every_kind_of_field_become_the_values_that_were_written() -> None:
    assert decoded([full_order(), None, Order(), Order(raw=b"")]) == [VALUE, None, ABSENT, {**ABSENT, "raw": b""}]
    assert decoded([full_order()], "shop.Order") == [VALUE]
    function = FromProtobuf("Order", DESCRIPTORS, {})
    assert isinstance(function.result, dict)
    fields = {field["name"]: (by_name(field["type"]), field["nullable"]) for field in function.result["fields"]}
    assert fields["small"], fields["large"] == (("integer", True), ("long", True))
    assert (fields["took"], fields["kind"]) == (("interval day to second", True), ("string", True))
    assert fields["tags"] == (("string", {"sku": "string", "counts": ["integer"]}), False)
    assert "nothing" not in fields


@pytest.mark.row("ends.4")
def test_options_of_spark_change_types_and_values_as_they_do_there() -> None:
    order = full_order()
    flags = {"upcast.unsigned.ints": "true", "enums.as.ints": "true", "unwrap.primitive.wrapper.types": "TRUE"}
    [found] = decoded([order], **flags)
    assert (found["small"], found["large"]) == ((1 << 32) - 1, Decimal((1 << 64) - 2))
    assert (found["kind"], found["limit"]) == (2, 3)
    [found] = decoded([Order()], **{"emit.default.values": "true"})
    assert found == {**ABSENT, "id": 0, "small": 0, "large": 0, "share": 0.0, "kind": "NEW"}
    [found] = decoded([order, Order(kind=9)][1:], **{"retain.empty.message.types": "true"})
    assert (found["kind"], found["nothing"]) == ("UNKNOWN_ENUM_VALUE_Kind_9", None)
    [found] = decoded([order], **{"retain.empty.message.types": "true", "convert.any.fields.to.json": "false"})
    assert found["nothing"] == {"__dummy_field_in_empty_struct": None}
    old = message_class(DESCRIPTORS, "Old")
    assert decoded([old(id=1), old(id=2, country="")], "Old") == [{"id": 1, "country": "DE"}, {"id": 2, "country": ""}]


@pytest.mark.row("ends.4")
def test_message_that_contains_itself_is_read_as_deep_as_the_option_says() -> None:
    node = message_class(DESCRIPTORS, "shop.Node")(name="a")
    node.below.add(name="b").below.add(name="c")
    with pytest.raises(PlanError, match=r"message shop\.Node contains itself: set recursive\.fields\.max\.depth"):
        decoded([node], "Node")
    depth = "recursive.fields.max.depth"
    assert decoded([node], "Node", **{depth: "1"}) == [{"name": "a"}]
    assert decoded([node], "Node", **{depth: "2"}) == [{"name": "a", "below": [{"name": "b"}]}]
    deep = [{"name": "a", "below": [{"name": "b", "below": [{"name": "c"}]}]}]
    assert decoded([node], "Node", **{depth: "3"}) == deep
    structs = descriptor_pb2.FileDescriptorSet()
    structs.file.add().ParseFromString(struct_pb2.DESCRIPTOR.serialized_pb)
    value = struct_pb2.Struct()
    value.update({"n": 1.5, "list": ["x", None]})
    [found] = decoded([value], "Struct", structs.SerializeToString(), **{depth: "3"})
    assert found["fields"]["n"]["number_value"] == 1.5
    assert [each["string_value"] for each in found["fields"]["list"]["list_value"]["values"]] == ["x", None]


@pytest.mark.row("ends.6")
@pytest.mark.parametrize("message", [b"\x08", b"\xff", b"\x0a\x01a", b"\x3a\x01\xff"])
def test_malformed_message_fails_or_is_null(message: bytes) -> None:
    """The third one has a text where the descriptor has a number, the last one a text that is not UTF-8."""
    with pytest.raises(ValueError, match="from_protobuf: a message of . bytes is malformed"):
        decoded([full_order(), message])
    assert decoded([full_order(), message], mode="permissive") == [VALUE, None]


@pytest.mark.row("ends.5")
def test_values_are_encoded_as_the_messages_that_hold_them() -> None:
    function = ToProtobuf("Order", DESCRIPTORS, {})
    order = full_order()
    order.ClearField("nothing")
    kind = FromProtobuf("Order", DESCRIPTORS, {}).result
    function.check(kind)
    rows = pa.array([dict(reversed(VALUE.items())), None, ABSENT], arrow_type(kind))
    encoded = function(rows).to_pylist()
    assert [each and Order.FromString(each) for each in encoded] == [order, None, b""]
    wide = {"upcast.unsigned.ints": "true", "enums.as.ints": "true", "unwrap.primitive.wrapper.types": "true"}
    other = FromProtobuf("Order", DESCRIPTORS, wide)
    function.check(other.result)
    assert Order.FromString(function(other(pa.array([order.SerializeToString()]))).to_pylist()[0]) == order


@pytest.mark.row("ends.5")
def test_generated_module_reads_what_was_written_and_the_other_way_round() -> None:
    files = descriptor_pb2.FileDescriptorSet()
    for module in (source_context_pb2, any_pb2, type_pb2, api_pb2):
        files.file.add().ParseFromString(module.DESCRIPTOR.serialized_pb)
    descriptors = files.SerializeToString()
    method = api_pb2.Method(name="get", request_streaming=True, syntax=type_pb2.SYNTAX_PROTO3)
    method.options.add(name="o").value.Pack(wrappers_pb2.StringValue(value="v"))
    api = api_pb2.Api(name="shop", methods=[method], source_context={"file_name": "a.proto"})
    read = FromProtobuf("google.protobuf.Api", descriptors, {})(pa.array([api.SerializeToString()]))
    assert read[0].as_py()["methods"][0]["syntax"] == "SYNTAX_PROTO3"
    write = ToProtobuf("google.protobuf.Api", descriptors, {})
    write.check(FromProtobuf("google.protobuf.Api", descriptors, {}).result)
    assert api_pb2.Api.FromString(write(read)[0].as_py()) == api


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("Missing", {}, "message 'Missing': the descriptors do not have it"),
        ("Empty", {}, "message 'Empty' has no fields"),
        ("Order", {"mode": "DROPMALFORMED"}, "mode 'DROPMALFORMED' is not FAILFAST or PERMISSIVE"),
        ("Order", {"enums.as.ints": "yes"}, "enums.as.ints 'yes' is not true or false"),
        ("Node", {"recursive.fields.max.depth": "11"}, "'11' is not -1 or a number from 1 to 10"),
        ("Order", {"convert.any.fields.to.json": "true"}, "'convert.any.fields.to.json' is not supported; its texts"),
        ("Order", {"enum.as.ints": "true"}, "the option 'enum.as.ints' is not supported; there are mode, recursive"),
        ("Order", {"schema.registry.basic.auth.user.info": "u:p"}, "needs schema.registry.url"),
    ],
)
def test_messages_and_options_that_cannot_be_read_are_refused(name: str, options: dict[str, str], problem: str) -> None:
    with pytest.raises(PlanError, match=problem):
        FromProtobuf(name, DESCRIPTORS, options)


def test_descriptors_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="no FileDescriptorSet of protoc"):
        FromProtobuf("Order", b"\xff", {})
    alone = descriptor_pb2.FileDescriptorSet()
    text_format.Parse('name: "a.proto" dependency: "b.proto"', alone.file.add())
    with pytest.raises(PlanError, match=r"lack the imported file 'b\.proto'; give protoc the option --include_imports"):
        FromProtobuf("Order", alone.SerializeToString(), {})
    protobuf_functions._described.cache_clear()
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(PlanError, match=r"pip install 'ckpt-runtime\[protobuf\]'"):
        FromProtobuf("Order", DESCRIPTORS, {})


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"id": "integer"}, "field id takes long, and the column is integer: cast it"),
        ({"kind": "long"}, "field kind takes string or integer, and the column is long"),
        (
            {"lines": {"type": "array", "elementType": "string", "containsNull": True}},
            "field lines.element takes struct",
        ),
        ({"at": "date"}, "field at takes timestamp, and the column is date"),
        ({"limit": "double"}, "field limit takes integer or long, and the column is double"),
        ({"other": "long"}, r"message shop\.Order has no field other"),
    ],
)
def test_columns_that_a_message_cannot_hold_are_refused(fields: dict[str, Any], problem: str) -> None:
    struct = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in fields.items()]
    with pytest.raises(PlanError, match=problem):
        ToProtobuf("Order", DESCRIPTORS, {}).check({"type": "struct", "fields": struct})
    with pytest.raises(PlanError, match="its argument is long, not a struct"):
        ToProtobuf("Order", DESCRIPTORS, {}).check("long")
    with pytest.raises(PlanError, match="the column has no field id, which the message requires"):
        ToProtobuf("Old", DESCRIPTORS, {}).check({"type": "struct", "fields": []})


@pytest.mark.row("ends.6")
@pytest.mark.parametrize(
    ("name", "row", "problem"),
    [
        ("Order", {"kind": "NONE"}, "'NONE' of field kind is not one of NEW, OLD"),
        ("Order", {"lines": [None]}, "an element of lines is null"),
        ("Order", {"tags": {"x": None}}, "a value of the map tags is null"),
        ("Old", {"id": None}, "field id is null, and the message requires it"),
    ],
)
def test_values_that_a_message_cannot_hold_fail(name: str, row: dict[str, Any], problem: str) -> None:
    kind = arrow_type(FromProtobuf(name, DESCRIPTORS, {}).result)
    rows = pa.array([row], pa.struct([field for field in kind if field.name in row]))
    with pytest.raises(ValueError, match=problem):
        ToProtobuf(name, DESCRIPTORS, {})(rows)


@pytest.mark.row("ends.5")
@pytest.mark.parametrize(("name", "indexes"), [("shop.Order", b"\x02\x02"), ("shop.Order.Line", b"\x04\x02\x00")])
def test_messages_are_written_in_confluents_format_with_their_file_registered_and_read_back(
    name: str, indexes: bytes
) -> None:
    kind = arrow_type(FromProtobuf(name, DESCRIPTORS, {}).result)
    rows = pa.array([{}], pa.struct(list(kind)))
    schemas: dict[Any, dict[str, Any]] = {}
    with registry(schemas) as serving:
        url = {"schema.registry.url": serving.url}
        [message] = ToProtobuf(name, DESCRIPTORS, {**url, "schema.registry.subject": "orders-value"})(rows).to_pylist()
        assert message[:1] + message[5:] == b"\x00" + indexes
        assert int.from_bytes(message[1:5], "big") == 100 + serving.ids.index(serving.subjects["orders-value"][0])
        for number, given in enumerate(serving.ids):
            assert given["schemaType"] == "PROTOBUF"
            descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(given["schema"]))
            schemas[100 + number] = given
        assert len(FromProtobuf(name, DESCRIPTORS, url)(pa.array([message], pa.binary()))) == 1


@pytest.mark.row("ends.5")
def test_files_that_a_message_imports_are_registered_before_it_under_their_names() -> None:
    money = text_format.Parse(
        """name: "shop/money.proto" package: "shop" syntax: "proto3" message_type { name: "Money"
        field { name: "cents" number: 1 type: TYPE_INT64 label: LABEL_OPTIONAL } }""",
        descriptor_pb2.FileDescriptorProto(),
    )
    price = text_format.Parse(
        """name: "shop/price.proto" package: "shop" syntax: "proto3" dependency: "shop/money.proto"
        message_type { name: "Price"
        field { name: "of" number: 1 type: TYPE_MESSAGE type_name: ".shop.Money" label: LABEL_OPTIONAL } }""",
        descriptor_pb2.FileDescriptorProto(),
    )
    files = descriptor_pb2.FileDescriptorSet(file=[money, price]).SerializeToString()
    with registry({}) as serving:
        options = {"schema.registry.url": serving.url, "schema.registry.subject": "prices-value"}
        [message] = ToProtobuf("shop.Price", files, options)(pa.array([{"of": {"cents": 5}}])).to_pylist()
    assert message == framed(101, b"\x00" + b"\x0a\x02\x08\x05")
    assert list(serving.subjects) == ["shop/money.proto", "prices-value"]
    reference = {"subject": "shop/money.proto", "version": 1, "name": "shop/money.proto"}
    assert serving.subjects["prices-value"][0]["references"] == [reference]


@pytest.mark.row("ends.4")
def test_messages_of_confluents_format_say_which_message_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(message_functions, "_PAUSE_S", 0.0)
    file = text_format.Parse(FILE, descriptor_pb2.FileDescriptorProto())
    moved = descriptor_pb2.FileDescriptorProto()
    moved.CopyFrom(file)
    moved.message_type.insert(0, descriptor_pb2.DescriptorProto(name="New"))
    serialized = [base64.b64encode(each.SerializeToString()).decode() for each in (file, moved)]
    schemas: dict[int | str, dict[str, Any]] = {
        1: {"schema": serialized[0], "schemaType": "PROTOBUF"},
        2: {"schema": serialized[1], "schemaType": "PROTOBUF"},
        3: {"schema": 'syntax = "proto3"; package shop;', "schemaType": "PROTOBUF"},
        4: {"schema": '"int"'},
    }
    order, line = Order(id=1).SerializeToString(), message_class(DESCRIPTORS, "shop.Order.Line")(sku="a")
    good = [framed(1, b"\x02\x02" + order), framed(2, b"\x02\x04" + order), framed(3, b"\x02\x02" + order)]
    bad = [
        (framed(1, b"\x00" + order), r"it is a message shop\.Empty, not shop\.Order"),
        (framed(1, b"\x04\x02\x00" + order), r"it is a message shop\.Order\.Line, not"),
        (framed(1, b"\x02\x10" + order), "it is a message of unknown type"),
        (framed(1, b"\x04\x02"), "does not have the indexes"),
        (framed(4, b"\x00" + order), "schema 4 of the Schema Registry is of type AVRO, not PROTOBUF"),
        (framed(9, b"\x00" + order), "no schema 9"),
        (b"\x01" + order, "does not begin with a zero byte"),
    ]
    with registry(schemas) as serving:
        given = {"schema.registry.url": serving.url, "schema.registry.basic.auth.user.info": "me:secret"}
        assert [row["id"] for row in decoded([*good, *good], **given)] == [1] * 6
        assert sorted(path for path, _ in serving.asked) == [
            f"/schemas/ids/{each}?format=serialized" for each in (1, 2, 3)
        ]
        nested = framed(1, b"\x04\x02\x00" + line.SerializeToString())
        assert decoded([nested], "shop.Order.Line", **given) == [{"sku": "a", "counts": []}]
        for message, problem in bad:
            with pytest.raises(ValueError, match=problem):
                decoded([message], **given)
        assert decoded([message for message, _ in bad], mode="PERMISSIVE", **given) == [None] * len(bad)
    with pytest.raises(RegistryError, match="schema 1 cannot be read from the Schema Registry"):
        decoded(good, mode="PERMISSIVE", **given)
