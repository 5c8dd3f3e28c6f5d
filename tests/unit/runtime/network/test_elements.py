"""Control elements on the wire: what is sent comes back, and anything else is refused as a ValueError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.network.elements import (
    CancelCheckpoint,
    CheckpointBarrier,
    ControlElement,
    EndOfData,
    EndOfPartition,
    EndOfRange,
    Watermark,
    decode_element,
    encode_element,
)

numbers = st.integers(-(1 << 63), (1 << 63) - 1)
properties = st.builds(
    CheckpointProperties,
    st.sampled_from(CheckpointType),
    st.one_of(st.none(), st.sampled_from(SavepointFormat)),
    st.booleans(),
    st.booleans(),
)
options = st.builds(
    CheckpointOptions, properties, st.text(), st.booleans(), numbers, st.one_of(st.none(), st.integers(0, 1 << 40))
)
elements = st.one_of(
    st.builds(CheckpointBarrier, numbers, numbers, options),
    st.builds(CancelCheckpoint, numbers),
    st.builds(Watermark, numbers),
    st.builds(EndOfData, st.booleans()),
    st.just(EndOfPartition()),
    st.just(EndOfRange()),
)


@given(elements)
def test_it_comes_back_equal(element: ControlElement) -> None:
    assert decode_element(memoryview(encode_element(element))) == element


@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError):
        decode_element(content)


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@given(json_values)
def test_any_other_json_is_refused(document: Any) -> None:
    with pytest.raises(ValueError):
        decode_element(json.dumps(document).encode())


@pytest.mark.parametrize("kind", ["barrier", "cancel", "watermark", "end_of_data"])
def test_missing_parts_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="malformed control element"):
        decode_element(json.dumps({"t": kind}).encode())


@pytest.mark.parametrize(
    "given_options",
    [None, [], "text", {}, {"properties": None}, {"properties": {"type": "NONSENSE", "savepoint_format": None}}],
)
def test_a_barrier_with_foreign_options_is_refused(given_options: Any) -> None:
    document = {"t": "barrier", "id": 1, "ts": 2, "options": given_options}
    with pytest.raises(ValueError):
        decode_element(json.dumps(document).encode())


def test_json_nested_beyond_all_measure_is_refused() -> None:
    with pytest.raises(ValueError):
        decode_element(b'{"t":' * 200_000)
