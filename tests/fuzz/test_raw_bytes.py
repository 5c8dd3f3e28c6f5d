"""Bytes that are nearly HTTP, or not at all, on a real socket: no 5xx, no hang, no change by a refusal."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_runtime.rest.app import create_app
from tests.fuzz.budget import ANSWER_S, LONG, budget
from tests.fuzz.contents import contents
from tests.support.rest_examples import NEW, PIPELINE, dispatcher
from tests.unit.runtime.rest.served import served

STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) ")
HOST = b"Host: localhost"
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from([2**63, -(2**63), 10**400]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "checkpointInterval", "checkpointTimeout", "unalignedEnabled", "maxInflightDataBytes", "checkpointType",
    "triggerId", "target-directory", "targetDirectory", "cancel-job", "drain", "formatType", "type", "savepoint-path",
    "entryClass", "parallelism", "flinkConfiguration", "programArgsList", "savepointPath", "claimMode", "jobId",
)  # fmt: skip
ROUTES = (
    ("PATCH", f"/jobs/{NEW}/checkpoints/configuration"), ("POST", f"/jobs/{NEW}/checkpoints"),
    ("POST", f"/jobs/{NEW}/savepoints"), ("POST", f"/jobs/{NEW}/stop"), ("POST", "/savepoint-disposal"),
    ("POST", f"/jars/{PIPELINE}/run"), ("PATCH", f"/jobs/{NEW}?mode=cancel"), ("DELETE", f"/jars/{PIPELINE}"),
    ("GET", f"/v1/jobs/{NEW}/metrics?get=a,b&agg=min"), ("POST", "/jars/upload"), ("GET", "/jobs/overview"),
)  # fmt: skip

APP = create_app(dispatcher(), token=None, max_upload_bytes=100_000)


pytestmark = pytest.mark.timeout(3600 if LONG else 600)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with served(APP) as url:
        yield int(url.rsplit(":", 1)[1])


def talk(port: int, sent: bytes) -> bytes:
    """All that the server answers to these bytes followed by the end of the stream."""
    received = bytearray()
    with socket.create_connection(("127.0.0.1", port), timeout=ANSWER_S) as connection:
        with suppress(ConnectionError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
        with suppress(ConnectionResetError):
            while chunk := connection.recv(65536):
                received += chunk
    return bytes(received)


def check(port: int, sent: bytes) -> None:
    """Statuses are below 500; refusals alone change nothing; the server keeps serving."""
    gateway = dispatcher()
    APP.state.dispatcher = gateway
    before = contents(gateway)
    answer = talk(port, sent)
    statuses = [int(status) for status in STATUS.findall(answer)]
    assert all(status < 500 for status in statuses), (sent, answer)
    if all(status >= 400 for status in statuses):
        assert contents(gateway) == before, (sent, answer)
    if answer and statuses and statuses[-1] >= 400 and not sent.startswith(b"HEAD"):
        body = answer.rsplit(b"\r\n\r\n", 1)[1]
        assert list(json.loads(body)) == ["errors"], (sent, answer)
    alive = talk(port, b"GET /overview HTTP/1.1\r\n" + HOST + b"\r\nConnection: close\r\n\r\n")
    assert alive.startswith(b"HTTP/1.1 200 ")


def request(method: bytes, target: bytes, headers: list[bytes], body: bytes) -> bytes:
    lines = [method + b" " + target + b" HTTP/1.1", HOST, b"Connection: close", *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Cuts, repeats, flips and inserts a few times."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["cut", "flip", "insert", "repeat", "remove"])):
            case "cut":
                del data[at:]
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case _:
                del data[at : at + draw(st.integers(1, 16))]
    return bytes(data)


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """JSON that a client might send, whole or damaged; NaN, surrogates and large numbers included."""
    document = draw(st.dictionaries(st.sampled_from(FIELDS) | st.text(), JSON_VALUES, max_size=4) | JSON_VALUES)
    text = json.dumps(document, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return damaged(draw, text) if draw(st.booleans()) else text


@st.composite
def nearly_http(draw: st.DrawFn) -> bytes:
    """A request with a wrong length, encoding, target or method, damaged or repeated on the same connection."""
    method, target = draw(st.sampled_from(ROUTES))
    body = draw(bodies())
    length = draw(st.sampled_from([len(body)] * 4 + [0, len(body) + 5, 10**30, -1]))
    framing = draw(
        st.sampled_from(
            [
                [b"Content-Length: " + str(length).encode()],
                [b"Transfer-Encoding: chunked"],
                [b"Content-Length: 3", b"Transfer-Encoding: chunked"],
                [b"Content-Length: 1", b"Content-Length: 2"],
                [b"Expect: 100-continue", b"Content-Length: " + str(len(body)).encode()],
                [b"Content-Type: multipart/form-data; boundary=x", b"Content-Length: " + str(len(body)).encode()],
                [b"Upgrade: websocket", b"Connection: upgrade"],
                [],
            ]
        )
    )
    if framing == [b"Transfer-Encoding: chunked"] and draw(st.booleans()):
        body = f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    path = draw(
        st.sampled_from([target.encode(), target.encode() + b"/../..", b"*", b"http://localhost" + target.encode()])
    )
    whole = request(method.encode(), path, framing, body)
    return damaged(draw, whole) if draw(st.booleans()) else whole


@given(st.binary(max_size=2000))
@budget(40)
def test_any_bytes(port: int, sent: bytes) -> None:
    check(port, sent)


@given(nearly_http())
@budget(150)
def test_requests_that_are_nearly_right(port: int, sent: bytes) -> None:
    check(port, sent)


@pytest.mark.parametrize("framing", [b"Transfer-Encoding: chunked", b"Content-Length: 3"])
@pytest.mark.parametrize(("method", "target"), [route for route in ROUTES if route[0] != "GET"])
def test_request_that_ends_after_its_head_changes_nothing(port: int, method: str, target: str, framing: bytes) -> None:
    check(port, request(method.encode(), target.encode(), [framing], b"{}"))


@pytest.mark.row("571.1")
@given(st.sampled_from(ROUTES), bodies())
@budget(150)
def test_any_body(port: int, route: tuple[str, str], body: bytes) -> None:
    method, target = route
    check(port, request(method.encode(), target.encode(), [b"Content-Length: " + str(len(body)).encode()], body))


def test_a_head_without_end_is_cut_off(port: int) -> None:
    """Memory for one request's head is bounded."""
    answer = talk(port, b"GET /jobs HTTP/1.1\r\n" + HOST + b"\r\nX-Long: " + b"x" * (8 * 1024 * 1024))
    assert not answer or b" 400 " in answer.split(b"\r\n", 1)[0]
    check(port, b"")
