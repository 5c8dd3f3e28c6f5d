"""Commit messages as JSON: what is carried, what is refused, and that no text names code to import."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import WriterCommitMessage

from ckpt_runtime.connectors.commit_messages import CommitMessageError, decode_message, encode_message


class Here:
    """Stands for the data source: its module is this one."""


@dataclass(frozen=True)
class Frozen(WriterCommitMessage):
    value: Any
    more: dict[str, Any] = field(default_factory=dict)


class Plain(WriterCommitMessage):
    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls = 1


class Slotted(WriterCommitMessage):
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


def round_trip(message: Any) -> Any:
    text = encode_message(message)
    return decode_message(None if text is None else json.dumps(json.loads(text)), Here)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
VALUES = st.recursive(
    SCALARS | st.dates() | st.datetimes() | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


@given(VALUES)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert round_trip(Frozen(value)) == Frozen(value)


def test_all_kinds_of_message_classes() -> None:
    assert round_trip(None) is None
    plain = round_trip(Plain((1, b"x")))
    assert (type(plain), plain.value, plain.calls) == (Plain, (1, b"x"), 1)
    assert round_trip(Slotted({1, 2})).value == {1, 2}
    assert round_trip(Frozen(Frozen(1), {"$tuple": [1]})) == Frozen(Frozen(1), {"$tuple": [1]})
    assert type(round_trip(WriterCommitMessage())) is WriterCommitMessage
    assert str(round_trip(Frozen(float("nan"))).value) == "nan"
    values = [float("inf"), datetime(2020, 1, 1, tzinfo=UTC), date(2020, 1, 1), Decimal("1.50"), 2j, frozenset("a")]
    assert round_trip(Frozen(values)) == Frozen(values)


def test_what_is_not_carried_is_named() -> None:
    with pytest.raises(CommitMessageError, match="commit message Frozen.value holds a object; allowed are JSON types"):
        encode_message(Frozen([object()]))
    with pytest.raises(CommitMessageError, match=r"write\(\) returned dict, expected a WriterCommitMessage or None"):
        encode_message({})


@pytest.mark.parametrize(
    "document",
    [
        {"$message": "subprocess.Popen", "fields": {"args": ["true"]}},
        {"$message": "Here", "fields": {}},
        {"$message": "Path", "fields": {}},
        {"$eval": "1"},
        {"a": 1, "b": 2},
    ],
)
def test_only_loaded_message_classes_are_made(document: dict[str, Any]) -> None:
    with pytest.raises(CommitMessageError):
        decode_message(json.dumps(document), Here)


def test_the_class_of_the_data_sources_module_wins() -> None:
    other = type("Plain", (WriterCommitMessage,), {"__module__": "elsewhere", "__qualname__": "Plain"})
    assert other in WriterCommitMessage.__subclasses__()
    assert type(round_trip(Plain(1))) is Plain
