from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.network.framing import (
    HEADER_BYTES,
    MAX_BODY_BYTES,
    FrameHeader,
    FrameKind,
    FramingError,
    channel_id,
    decode_buffer_size,
    decode_credit,
    decode_header,
    deployment_of,
    encode_buffer_size,
    encode_credit,
    encode_header,
)


@given(st.integers(0, 2**64 - 1), st.integers(0, MAX_BODY_BYTES), st.sampled_from(FrameKind))
def test_headers_survive_the_wire(channel: int, length: int, kind: FrameKind) -> None:
    encoded = encode_header(channel, length, kind)
    assert len(encoded) == HEADER_BYTES
    assert decode_header(encoded) == FrameHeader(channel, length, kind)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_any_header_is_a_frame_or_refused(content: bytes) -> None:
    try:
        header = decode_header(content)
    except FramingError:
        return
    assert header.length <= MAX_BODY_BYTES


def test_a_body_above_the_limit_is_refused_on_both_sides() -> None:
    with pytest.raises(FramingError, match="exceeds the limit"):
        encode_header(1, MAX_BODY_BYTES + 1, FrameKind.DATA)
    with pytest.raises(FramingError, match="announced"):
        decode_header(struct.pack("<QIB3x", 1, MAX_BODY_BYTES + 1, FrameKind.DATA))


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_channel_ids_name_their_deployment(deployment: int, index: int) -> None:
    assert deployment_of(channel_id(deployment, index)) == deployment


def test_credit_and_buffer_size_are_one_number() -> None:
    assert decode_credit(encode_credit(7)) == 7
    with pytest.raises(FramingError, match="3 bytes"):
        decode_credit(b"abc")
    assert decode_buffer_size(encode_buffer_size(256)) == 256
    with pytest.raises(FramingError, match="5 bytes"):
        decode_buffer_size(b"abcde")
    with pytest.raises(FramingError, match="of 0 bytes"):
        decode_buffer_size(encode_buffer_size(0))
