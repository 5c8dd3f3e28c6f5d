"""The body of each request with each field in turn forged: taken, or refused by name without a change."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.fuzz.contents import contents
from tests.support.forging import forged
from tests.support.rest_examples import NEW, PIPELINE, RUNNING, SNAPSHOT, bounds, dispatcher
from tests.unit.runtime.rest.conftest import open_app, send_to

JOB = f"/jobs/{RUNNING}"
SUBMISSION = {
    "entryClass": "flights:pipeline",
    "programArgsList": ["--output", "/data/out"],
    "parallelism": 2,
    "jobId": "1" * 32,
    "likeJob": NEW,
    "savepointPath": SNAPSHOT,
    "allowNonRestoredState": True,
    "claimMode": "NO_CLAIM",
    "flinkConfiguration": {"execution.checkpointing.interval": "10s"},
    "fork": True,
}
SETTINGS = {"checkpointInterval": 10_000, "checkpointTimeout": 900_000, "unalignedEnabled": True}
MARK = {"savepoint-path": SNAPSHOT, "kind": "DRILL", "passed": True, "by": "ana", "detail": "4 s", "duration": 9_800}
SAVEPOINT = {"target-directory": "/s", "cancel-job": False, "formatType": "NATIVE", "triggerId": "3" * 32}
STOP = {"targetDirectory": "/s", "drain": False, "formatType": "CANONICAL", "triggerId": "4" * 32}
UPGRADE = {"owner": "upgrade-1", "duration": 3_600_000, "ownJobs": ["5" * 32], "snapshot": "/s/1"}
OPTIONS = {"execution.checkpointing.interval": "5 s", "parallelism.default": "2"}
BODIES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", f"/jars/{PIPELINE}/plan", SUBMISSION),
    ("POST", f"/jars/{PIPELINE}/run", SUBMISSION),
    ("POST", f"/jars/{PIPELINE}/drill", {**SUBMISSION, "jobId": "6" * 32}),
    ("PUT", f"{JOB}/config", {"configuration": OPTIONS, "version": 1}),
    ("PATCH", f"{JOB}/config", {"configuration": {**OPTIONS, "execution.checkpointing.timeout": None}}),
    ("PUT", f"{JOB}/upgrade", UPGRADE),
    ("PUT", f"{JOB}/resource-requirements", bounds(2)),
    ("PATCH", f"{JOB}/checkpoints/configuration", SETTINGS),
    ("POST", f"{JOB}/checkpoints", {"checkpointType": "FULL", "triggerId": "2" * 32}),
    ("POST", f"{JOB}/savepoints", SAVEPOINT),
    ("POST", f"{JOB}/stop", STOP),
    ("POST", "/savepoint-disposal", {"savepoint-path": "/s/1", "triggerId": "5" * 32}),
    ("POST", "/savepoints/marks", MARK),
]
WITHOUT_JSON = {"/jars/upload", "/web/login"}
"""The first takes a file as a form, the second a form of the sign-in page: see ``test_uploads_endpoint.py`` and
``test_pages.py``."""


def _fault(response: httpx.Response, change: str, unchanged: bool) -> str | None:
    """What is wrong with the answer to a forged body."""
    if response.status_code < 300:
        return None
    if not 400 <= response.status_code < 500:
        return "no answer to a bad request"
    text = " ".join(response.json()["errors"])
    if not unchanged:
        return "the refusal has changed something"
    if "Traceback" in text or "Error(" in text or "pydantic" in text:
        return "it shows an error of Python"
    path = change.split(": ", maxsplit=1)[0]
    return None if any(name in text for name in path.split(".")) else f"it does not name {path}"


@pytest.mark.parametrize(("method", "path", "body"), BODIES, ids=lambda given: given if isinstance(given, str) else "")
def test_forged_body_is_taken_or_refused_by_name_and_a_refusal_changes_nothing(
    method: str, path: str, body: dict[str, Any]
) -> None:
    accepted = send_to(dispatcher())(method, path, json=body)
    assert accepted.status_code in (200, 202), accepted.text
    gateway, before = dispatcher(), contents(dispatcher())
    found, refused = [], 0
    for change, forged_body in forged(body):
        response = send_to(gateway)(method, path, json=forged_body)
        after = contents(gateway)
        refused += response.status_code >= 400
        if fault := _fault(response, change, after == before):
            found.append(f"{change}: {response.status_code}, {fault}: {response.text[:200]}")
        if after != before:
            gateway, before = dispatcher(), contents(dispatcher())
    assert not found, "\n".join(found)
    assert refused > 0


def test_each_route_that_takes_a_body_is_among_these() -> None:
    document = open_app().openapi()
    described = {
        (method.upper(), path)
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
        if "requestBody" in operation
    }
    values = {"jobid": RUNNING, "jarid": PIPELINE}
    tried = {(method, path) for method, path, _ in BODIES}
    assert {(method, path.format(**values)) for method, path in described if path not in WITHOUT_JSON} == tried
