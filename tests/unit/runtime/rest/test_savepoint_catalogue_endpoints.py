"""The savepoint catalogue over REST: lists, the latest good one, marks, who asked; and what is refused."""

from __future__ import annotations

import pytest

from ckpt_runtime.client import requests
from tests.support.rest_examples import SNAPSHOT, catalogue
from tests.unit.runtime.rest.conftest import JOB, Send
from tests.unit.runtime.rest.fake_gateway import FakeGateway

MARK = {"savepoint-path": SNAPSHOT, "kind": "DRILL", "passed": True}


@pytest.fixture(autouse=True)
def savepoints(gateway: FakeGateway) -> None:
    gateway.catalogue = catalogue(gateway.now)


@pytest.mark.row("air.10")
def test_savepoints_are_listed_with_their_known_properties(send: Send) -> None:
    answer = send("GET", "/v1/savepoints", params={"directory": "/data/savepoints"}).json()
    proven, failed, old, damaged = answer["savepoints"]
    assert answer["directory"] == "/data/savepoints"
    assert (proven["good"], proven["taken-by"], proven["duration"]) == (True, "airflow: nightly/savepoint", 800)
    assert (proven["verified"]["by"], proven["drilled"]["duration"]) == ("ana", 9_800)
    assert (failed["good"], failed["problem"]) == (False, "its newest verification failed: the file is missing")
    assert (old["good"], old["job-name"], old["verified"]) == (True, None, None)
    assert damaged.keys() == {"location", "good", "problem"}
    assert [found.location for found in requests.list_savepoints().parse(answer)] == [
        item["location"] for item in answer["savepoints"]
    ]


@pytest.mark.row("air.10")
def test_latest_good_savepoint_is_one_call(send: Send, gateway: FakeGateway) -> None:
    assert send("GET", "/savepoints/latest", params={"job": "flights"}).json()["location"] == SNAPSHOT
    gateway.catalogue = gateway.catalogue[1:2]
    assert send("GET", "/savepoints/latest").status_code == 404
    assert send("GET", "/savepoints/latest", params={"job": ""}).status_code == 400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "LOOK"}, "kind: 'LOOK' is not acceptable, it must be one of VERIFICATION, DRILL"),
        ({"passed": "yes"}, "passed: 'yes' is not acceptable, it must be true or false"),
        ({"passed": None}, "Field passed must not be omitted or be null."),
        ({"savepoint-path": "relative"}, "it must be an absolute path or a URL with a scheme"),
        ({"detail": "x" * 1_001}, "detail: '1001 characters' is not acceptable, it must be at most 1000 printable"),
        ({"by": "a\x1b[1m"}, "by: '5 characters' is not acceptable"),
        ({"duration": -1}, "duration: -1 is not acceptable"),
    ],
)
def test_document_that_is_not_a_mark_is_refused(send: Send, change: dict[str, object], message: str) -> None:
    response = send("POST", "/savepoints/marks", json={**MARK, **change})
    assert response.status_code == 400
    assert message in response.json()["errors"][0]


@pytest.mark.parametrize(
    ("call", "path"), [(requests.trigger_savepoint, "savepoints"), (requests.stop_with_savepoint, "stop")]
)
def test_requester_is_read_from_a_header(send: Send, gateway: FakeGateway, call: object, path: str) -> None:
    assert callable(call)
    built = call(JOB, "/s", requester="airflow: nächtlich/savepoint 100%")
    assert send("POST", f"/jobs/{JOB}/{path}", json=built.body, headers=built.headers).status_code == 202
    assert gateway.requesters == ["airflow: nächtlich/savepoint 100%"]
    refused = send("POST", f"/jobs/{JOB}/{path}", json={}, headers={"Ckpt-Requester": "x" * 601})
    assert refused.status_code == 400
