"""Bad paths, ids, parameters and bodies: always 4xx in Flink's error shape, never a change, never a 5xx."""

from __future__ import annotations

import contextlib
import re
import time
from typing import Any

import pytest

from ckpt_runtime.rest.exchange import MAX_BODY_BYTES, JsonRefused, parse_json
from tests.unit.runtime.rest.conftest import JOB, Send, send_to
from tests.unit.runtime.rest.fake_gateway import VERTICES, FakeGateway

BAD_IDS = [
    "x", JOB[:-1], JOB + "0", JOB[:-1] + "g", JOB[:-1] + "%00", JOB[:-1] + "%0a", JOB + "%0a", "%252f" * 8,
    "٠" * 32, "%ff" * 32, "-" + JOB[1:], "0x" + JOB[2:], "..", "%2e%2e", "a" * 5000, "%",
]  # fmt: skip
JOB_PATHS = [
    ("GET", ""), ("PATCH", ""), ("GET", "/status"), ("GET", "/plan"), ("GET", "/config"), ("GET", "/metrics"),
    ("GET", "/exceptions"), ("GET", "/execution-result"), ("GET", "/progress"),
    ("GET", "/accumulators"), ("GET", "/jobmanager/config"),
    ("GET", "/checkpoints"), ("GET", "/checkpoints/config"), ("GET", "/checkpoints/configuration"),
    ("PATCH", "/checkpoints/configuration"), ("DELETE", "/checkpoints/configuration"), ("POST", "/checkpoints"),
    ("POST", "/savepoints"), ("POST", "/stop"), ("GET", f"/vertices/{VERTICES[0]}"),
    ("GET", f"/vertices/{VERTICES[0]}/metrics"), ("GET", f"/vertices/{VERTICES[0]}/subtasks/metrics"),
    ("GET", f"/vertices/{VERTICES[0]}/backpressure"), ("GET", f"/vertices/{VERTICES[0]}/subtasktimes"),
    ("GET", f"/checkpoints/{'a' * 32}"), ("GET", f"/savepoints/{'a' * 32}"), ("GET", "/checkpoints/details/1"),
]  # fmt: skip
DIRECTORIES: list[Any] = [
    17, True, [], {}, "", "  ", "relative/dir", "file:///a/../../etc", "/a/..", "..", "a\nb", "/a\x00b",
    "/" + "x" * 5000, "s3:\\..\\x",
]  # fmt: skip


def assert_4xx(response: Any, status: int | None = None) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert status is None or response.status_code == status, response.text
    assert list(response.json()) == ["errors"]
    assert all(isinstance(line, str) and "Traceback" not in line for line in response.json()["errors"])


@pytest.mark.parametrize("bad", BAD_IDS)
@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_malformed_job_ids_are_refused(send: Send, bad: str, prefix: str) -> None:
    for method, rest in [("GET", ""), ("GET", "/status"), ("POST", "/stop"), ("PATCH", "/checkpoints/configuration")]:
        assert_4xx(send(method, f"{prefix}/jobs/{bad}{rest}", **({"content": b"{}"} if method != "GET" else {})))


@pytest.mark.parametrize(("method", "rest"), JOB_PATHS)
def test_unknown_jobs_are_404_everywhere(send: Send, gateway: FakeGateway, method: str, rest: str) -> None:
    body = {"target-directory": "/s"} if method == "POST" else {"checkpointInterval": 10} if method == "PATCH" else None
    arguments = {} if body is None else {"json": body}
    assert_4xx(send(method, f"/jobs/{'0' * 32}{rest}", **arguments), 404)
    assert not gateway.operations


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"), ("GET", ""), ("GET", "/nosuch"), ("GET", "/v1"), ("GET", "/v1/"), ("GET", "/v1/v1/overview"),
        ("GET", "/jobs//x"), ("POST", "/overview"), ("HEAD", "/overview"), ("OPTIONS", "/jobs"), ("BREW", "/jobs"),
        ("PUT", f"/jobs/{JOB}/config"), ("DELETE", f"/jobs/{JOB}"), ("GET", "/jars/upload/../../etc/passwd"),
        ("GET", "/docs"), ("GET", f"/jobs/{JOB}/yarn-cancel"), ("GET", "/jobs/%2e%2e/overview"),
    ],
)  # fmt: skip
def test_unknown_paths_and_methods_are_404(send: Send, method: str, path: str) -> None:
    response = send(method, path)
    if method == "HEAD":
        assert response.status_code == 404
        return
    assert response.status_code in (400, 404)
    if response.status_code == 404:
        assert response.json()["errors"][0].startswith("Not found: /")


def test_the_message_repeats_the_path_as_it_was_sent(send: Send) -> None:
    assert send("GET", "/v1/nosuch").json() == {"errors": ["Not found: /v1/nosuch"]}


@pytest.mark.parametrize("path", ["savepoints", "stop"])
@pytest.mark.parametrize("value", DIRECTORIES, ids=lambda value: repr(value)[:30])
def test_bad_directories_are_refused_and_start_nothing(send: Send, gateway: FakeGateway, path: str, value: Any) -> None:
    field = "target-directory" if path == "savepoints" else "targetDirectory"
    assert_4xx(send("POST", f"/jobs/{JOB}/{path}", json={field: value}), 400)
    assert not gateway.operations


@pytest.mark.parametrize(
    "body",
    [
        {"formatType": "x"}, {"type": "x"}, {"formatType": 1}, {"cancel-job": "true"}, {"cancel-job": 1},
        {"triggerId": "short"}, {"triggerId": "g" * 32}, {"triggerId": 5}, {"triggerId": JOB + "\n"},
        {"formatType": "NATIVE", "type": "canonical"}, {"targetDirectory": "/other"}, {"formatType": "ﬁ"},
    ],
)  # fmt: skip
def test_bad_savepoint_fields_are_refused_and_start_nothing(
    send: Send, gateway: FakeGateway, body: dict[str, Any]
) -> None:
    assert_4xx(send("POST", f"/jobs/{JOB}/savepoints", json={"target-directory": "/s", **body}), 400)
    assert not gateway.operations


@pytest.mark.parametrize("query", ["maxExceptions=0", "maxExceptions=x", "maxExceptions=1e3", "maxExceptions=99999999"])
def test_bad_query_parameters_are_refused(send: Send, query: str) -> None:
    assert_4xx(send("GET", f"/jobs/{JOB}/exceptions?{query}"), 400)
    assert_4xx(send("GET", f"/jobs/{JOB}/vertices/{VERTICES[0]}/subtasks/metrics?get=a&agg=median"), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"entryClass": "no-colon"}, {"entryClass": "os:system('x')"}, {"entryClass": "../x:main"}, {"parallelism": 0},
        {"parallelism": "2"}, {"parallelism": 32769}, {"parallelism": True}, {"programArgsList": "a b"},
        {"programArgsList": [1]}, {"programArgs": "a b"}, {"flinkConfiguration": []}, {"flinkConfiguration": {"a": []}},
        {"savepointPath": "relative"}, {"claimMode": "LEGACY"}, {"restoreMode": "x"}, {"jobId": "x"},
        {"allowNonRestoredState": "yes"}, {"savepointPath": "file:///nope"},
        {"flinkConfiguration": {"bad.option": "1"}},
    ],
)  # fmt: skip
def test_bad_run_requests_are_refused_and_start_nothing(send: Send, gateway: FakeGateway, body: dict[str, Any]) -> None:
    stored = send("POST", "/jars/upload", files={"jarfile": ("a.py", b"x")}).json()["filename"].split("/")[-1]
    assert_4xx(send("POST", f"/jars/{stored}/run", json=body), 400)
    assert list(gateway.jobs) == [JOB]


def test_run_parameters_in_the_query_are_refused_not_ignored(send: Send, gateway: FakeGateway) -> None:
    assert_4xx(send("POST", "/jars/x/run?savepointPath=/s", json={}), 400)


def test_too_large_a_body_is_refused_before_it_is_parsed(send: Send) -> None:
    big = b'{"a": "' + b"x" * (1024 * 1024) + b'"}'
    assert_4xx(send("POST", f"/jobs/{JOB}/checkpoints", content=big), 413)

    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 65536

    assert_4xx(send("POST", f"/jobs/{JOB}/checkpoints", content=chunks()), 413)
    assert_4xx(send("POST", f"/jobs/{JOB}/checkpoints", content=b"{}", headers={"content-length": "9" * 40}), 413)


def test_request_to_a_driver_that_is_not_ready_gets_503(send: Send, gateway: FakeGateway) -> None:
    gateway.ready = False
    response = send("GET", "/jobs")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json() == {"errors": ["this driver is starting"]}


def test_an_error_of_ours_shows_no_traceback(gateway: FakeGateway) -> None:
    async def broken() -> Any:
        raise RuntimeError("secret detail")

    gateway.list_jobs = broken  # type: ignore[method-assign]
    response = send_to(gateway)("GET", "/jobs")
    assert response.status_code == 500
    assert response.json() == {"errors": ["Internal server error.", "RuntimeError"]}


@pytest.mark.parametrize("piece", [b'\\"', b'"', b"[", b'{"a":', b'["', b'\\"["', b"{},", b'"",', b"1", b"\\", b'"\\'])
def test_a_body_is_parsed_in_a_time_that_grows_with_its_length(piece: bytes) -> None:
    """Backtracking, if there was any, would take minutes."""
    for start in (b"", b'{"a":"', b'["', b"["):
        body = start + piece * (MAX_BODY_BYTES // len(piece))
        began = time.process_time()
        with contextlib.suppress(JsonRefused):
            parse_json(body)
        assert time.process_time() - began < 10


@pytest.mark.parametrize(("levels", "fine"), [(32, True), (33, False), (900, False), (100_000, False)])
def test_the_depth_of_a_body_is_limited(levels: int, fine: bool) -> None:
    for start, end in (("[", "]"), ('{"a":', "}")):
        text = start * levels + ("1" if start != "[" else "") + end * levels
        if fine:
            parse_json(text.encode())
        else:
            with pytest.raises(JsonRefused, match="nested deeper than 32 levels"):
                parse_json(text.encode())


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ('{"a": {"b": NaN}}', "NaN is not a JSON number, in the field 'a.b'"),
        ('{"a": [1, -1e999]}', "a number is too large, in the field 'a.1'"),
        ('{"a": %s}' % ("9" * 5_000), "a number has too many digits, in the field 'a'"),
        ('{"a": "\\ud800"}', "a string holds a lone surrogate, in the field 'a'"),
        ('{"b": "[[", "a": %s}' % ("[" * 40 + "]" * 40), "nested deeper than 32 levels, in the field 'a.0"),
        ('{"b": "[[", "a": %s}' % ("[" * 5_000 + "]" * 5_000), "nested deeper than 32 levels, in the field 'a'"),
        ('{"a": {"b": 1, "b": 2}}', "the key 'b' occurs twice"),
    ],
)
def test_a_value_that_json_does_not_have_is_refused_with_its_place(body: str, problem: str) -> None:
    with pytest.raises(JsonRefused, match=re.escape(problem)):
        parse_json(body.encode())


def test_brackets_in_a_text_are_no_nesting() -> None:
    assert parse_json(b'["' + b"[" * 1_000 + b'"]') == ["[" * 1_000]


@pytest.mark.parametrize(
    "body",
    [
        {"flinkConfiguration": {f"acme.{n}": "1" for n in range(501)}},
        {"flinkConfiguration": {"a" * 1025: "1"}},
        {"flinkConfiguration": {"acme.x": "1" * 70_000}},
        {"programArgsList": [""] * 10_001},
    ],
)
def test_a_run_request_has_a_limited_size(send: Send, gateway: FakeGateway, body: dict[str, Any]) -> None:
    stored = send("POST", "/jars/upload", files={"jarfile": ("a.py", b"x")}).json()["filename"].split("/")[-1]
    answer = send("POST", f"/jars/{stored}/run", json=body)
    assert_4xx(answer, 400)
    assert "at most" in answer.text
