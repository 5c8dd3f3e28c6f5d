"""Replays exchanges recorded on a Flink 2.3.0 cluster: the same request gives the same status and shape."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.checkpoint.properties import CheckpointType
from ckpt_runtime.failure_report import FailureCause
from ckpt_runtime.jobmaster import gateway_values as g
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.version import FLINK_VERSION, VERSION
from tests.unit.runtime.rest.conftest import JOB, Send, send_to
from tests.unit.runtime.rest.fake_gateway import VERTICES, FakeGateway, Operation

PAGE = Path(__file__).parents[4] / "docs" / "rest.md"
DATA = Path(__file__).parents[3] / "data"
RECORDED = ("flink_rest_contract.json", "flink_vertex_contract.json")
CONTRACT = [exchange for name in RECORDED for exchange in json.loads((DATA / name).read_text())]
RECORDED_VERTICES = (
    "f362c87ffabe89c8a91fa7d0a523ba6c",
    "b71731f1c0df9c3076c4a455334d0ad6",
    "2e588ce1c86a9d46e2e85186773ce4fd",
)
UNKNOWN = "0" * 32
HEX = re.compile(r"[0-9a-f]{32}")
CAUSE = FailureCause("ckpt.CheckpointFailed", "no room", "ckpt.CheckpointFailed: no room")

# Recorded behaviour that is deliberately not ours: our status, and the line of docs/rest.md that says why.
UNKNOWN_JOB = "trigger on an unknown job"
ENDED_JOB = "trigger on a job that has ended"
UNKNOWN_METRICS = "unknown job or vertex in `/metrics`, `/backpressure`"
SPELLINGS = "spelling of fields"
REQUIREMENTS_OF_NONE = "`/resource-requirements` of an unknown job, or of one that has ended"
DIFFERENCES: dict[str, tuple[int, str]] = {
    "run jar: unknown class": (400, "unknown pipeline or entry point"),
    "run jar: unknown jar id": (404, "unknown pipeline or entry point"),
    "FLIP-571 PATCH checkpoints/configuration (not present?)": (200, "`PATCH`, `DELETE .../checkpoints/configuration`"),
    "FLIP-530 PUT job config (not present?)": (200, "`PUT`, `PATCH /jobs/:jobid/config`"),
    "FLIP-530 PUT job config (adaptive; not present?)": (200, "`PUT`, `PATCH /jobs/:jobid/config`"),
    "PATCH job config": (400, "`PUT`, `PATCH /jobs/:jobid/config`"),
    "GET checkpoints/configuration": (200, "`GET .../checkpoints/configuration`"),
    "unknown job: GET /status": (404, "unknown job in `/status`"),
    "unknown job: GET /metrics": (404, UNKNOWN_METRICS),
    "unknown job: GET /vertices/b71731f1c0df9c3076c4a455334d0ad6/backpressure": (404, UNKNOWN_METRICS),
    "backpressure, unknown vertex": (404, UNKNOWN_METRICS),
    "trigger checkpoint INCREMENTAL": (400, "`checkpointType: INCREMENTAL`"),
    "trigger checkpoint, lower-case type": (202, "enum values"),
    "savepoint, lower-case formatType": (202, "enum values"),
    "trigger checkpoint, unknown job": (404, UNKNOWN_JOB),
    "savepoint, unknown job": (404, UNKNOWN_JOB),
    "checkpoint of a finished job": (409, ENDED_JOB),
    "savepoint of a finished job": (409, ENDED_JOB),
    "stop a finished job": (409, ENDED_JOB),
    "savepoint with camel-case targetDirectory": (202, SPELLINGS),
    "stop with kebab-case target-directory": (202, SPELLINGS),
    "savepoint, number as directory": (400, "a number as a directory"),
    "unknown job: GET /resource-requirements": (404, REQUIREMENTS_OF_NONE),
    "resource requirements GET unknown job (adaptive)": (404, REQUIREMENTS_OF_NONE),
    "resource requirements PUT unknown job (adaptive)": (404, REQUIREMENTS_OF_NONE),
    "resource requirements PUT: unknown job (default)": (404, REQUIREMENTS_OF_NONE),
    "resource requirements of a finished job (default)": (409, REQUIREMENTS_OF_NONE),
    "resource requirements GET (default scheduler)": (200, "`/resource-requirements`"),
    "resource requirements PUT (default scheduler)": (200, "`/resource-requirements`"),
    "aggregated, malformed subtasks": (400, "malformed `subtasks` of a vertex's aggregated metrics"),
    "legacy GET yarn-cancel": (404, "`GET /jobs/:jobid/yarn-cancel`"),
}
NOT_SERVED = {r"/rescaling(/[0-9a-f]{32})?$": "`/jobs/:jobid/rescaling`", r"/rescales/": "`/jobs/:jobid/rescales`"}
DOCUMENTED = {
    line.split(" | ")[0].removeprefix("| ") for line in PAGE.read_text().splitlines() if line.startswith("| ")
}


def expected(exchange: dict[str, Any]) -> int:
    """Our status for a recorded exchange."""
    path = exchange["path"].partition("?")[0]
    if any(re.search(pattern, path) for pattern in NOT_SERVED):
        return 404
    status: int = DIFFERENCES.get(exchange["name"], (exchange["status"], ""))[0]
    return status


def shape(value: Any) -> Any:
    """Keys and JSON types; ids as keys count as one, lists keep the shape of each item."""
    if isinstance(value, dict):
        return {HEX.sub("<id>", key): shape(item) for key, item in value.items()}
    if isinstance(value, list):
        items = [item for item in value if not (isinstance(item, str) and item.startswith("<trimmed"))]
        return [shape(item) for item in items]
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)) or value == "NaN":
        return "number"
    return "null" if value is None else "string"


def missing(recorded: Any, ours: Any, where: str = "") -> list[str]:
    """What the recorded shape has and ours has not, or has with another type. Null goes with everything."""
    if "null" in (recorded, ours):
        return []
    if isinstance(recorded, dict) and isinstance(ours, dict):
        absent = [f"{where}.{key} is missing" for key in recorded if key not in ours]
        inner = (missing(recorded[key], ours[key], f"{where}.{key}") for key in recorded if key in ours)
        return absent + [problem for problems in inner for problem in problems]
    if isinstance(recorded, list) and isinstance(ours, list):
        # A recorded item must look like one of ours; which ones there are depends on the job, not on the contract.
        best = [min((missing(item, other, f"{where}[]") for other in ours), key=len) for item in recorded if ours]
        return [problem for problems in best for problem in problems]
    return [] if recorded == ours else [f"{where} is {ours}, Flink has {recorded}"]


def prepared(exchange: dict[str, Any]) -> FakeGateway:
    """A dispatcher in which the recorded request makes sense."""
    name, path, body = exchange["name"], exchange["path"].lower(), exchange["response_body"]
    fake = FakeGateway()
    for job_id in {JOB, *re.findall(r"/jobs/([0-9a-f]{32})", path)} - {UNKNOWN}:
        job = fake.add_job(job_id)
        fake.complete_checkpoint(job)
        fake.complete_checkpoint(job)
        fake.complete_checkpoint(job, CheckpointType.SYNC_SAVEPOINT, "NATIVE")
        for _ in range(32 - job.next_checkpoint):
            job.next_checkpoint += 1
        failed = fake.start_checkpoint(job)
        job.tracker.report_failed(failed, fake.now + 5, "expired")
        job.tracker.report_restored(1, fake.now, False, "file:/data/chk-1")
        if "exceptions" in name and "none" not in name:
            job.exceptions = [g.ExceptionEntry(CAUSE, fake.now, "count (1/2)", "localhost:1", "agent-0")] * 2
        if ("default dir" in name and "without" not in name) or "(adaptive)" in name:
            fake.jobs[job_id].savepoint_directory = "file:/data/savepoints"
        if "a finished job" in name:
            fake.move(job_id, JobStatus.FINISHED)
        if name == "cancel again":
            fake.move(job_id, JobStatus.CANCELED)
    for pipeline in re.findall(r"/jars/([^/]+)/run", path) if "unknown jar" not in name else ():
        fake.pipelines[pipeline] = g.StoredPipeline(pipeline, "job.py", fake.now)
    add_operation(fake, path, body)
    return fake


def add_operation(fake: FakeGateway, path: str, body: Any) -> None:
    match = re.search(r"(checkpoint|savepoint|savepoint-disposal)s?/([0-9a-f]{32})$", path)
    if match is None or "status" not in body:
        return
    kind = g.OperationKind(match[1])
    outcome = body["operation"]
    status = g.OperationStatus(
        completed=outcome is not None,
        location=(outcome or {}).get("location"),
        checkpoint_id=(outcome or {}).get("checkpointId"),
        failure=CAUSE if "failure" in str(outcome) else None,
    )
    job_id = None if kind is g.OperationKind.SAVEPOINT_DISPOSAL else path.split("/")[2]
    fake.operations[match[2]] = Operation(kind, job_id, 99, None, status)


@pytest.mark.row("io.1")
@pytest.mark.parametrize("exchange", CONTRACT, ids=[f"{number}-{item['name']}" for number, item in enumerate(CONTRACT)])
def test_recorded_exchange(exchange: dict[str, Any]) -> None:
    send = send_to(prepared(exchange))
    path = exchange["path"].replace(RECORDED_VERTICES[1], VERTICES[1])
    body = copy.deepcopy(exchange["request_body"])
    if path.endswith("/resource-requirements") and isinstance(body, dict):
        ours = dict(zip(RECORDED_VERTICES, VERTICES, strict=True))
        body = {ours.get(vertex, vertex): wanted for vertex, wanted in body.items()}
    arguments: dict[str, Any] = {}
    if isinstance(body, str) and body.startswith("<multipart"):
        arguments["files"] = {"jarfile": ("job.py", b"x = 1")}
    elif isinstance(body, str):
        arguments["content"] = body.encode()
    elif body is not None:
        if "entryClass" in body and "unknown" not in exchange["name"]:
            body["entryClass"] = "lab.job:main"
        arguments["json"] = body

    response = send(exchange["method"], path, **arguments)

    assert response.status_code == expected(exchange), response.text
    assert response.headers["content-type"] == "application/json; charset=UTF-8"
    if response.status_code == exchange["status"]:
        recorded, ours = shape(exchange["response_body"]), shape(response.json())
        assert missing(recorded, ours) == []


def test_class_names_of_subtasks_are_those_of_flink() -> None:
    exchange = next(item for item in CONTRACT if "have not acknowledged" in item["name"])
    answer = send_to(prepared(exchange))("GET", exchange["path"].replace(RECORDED_VERTICES[1], VERTICES[1])).json()
    names = {(item["className"], item["status"]) for item in answer["subtasks"]}
    assert names == {(item["className"], item["status"]) for item in exchange["response_body"]["subtasks"]}


@pytest.mark.parametrize("path", ["//overview", "/overview//", "//v1/overview/", "/jars/", "/v1/jobs/"])
def test_slashes_around_a_path_do_not_matter(send: Send, path: str) -> None:
    """They come of addresses that clients put together, and Flink serves them."""
    assert send("GET", f"http://localhost{path}").json() == send("GET", path.strip("/")).json()
    wrong = send("GET", f"http://localhost{path}no/such/").json()
    assert wrong == {"errors": [f"Not found: {path}no/such/"]}


def test_query_selects_the_jobs_and_subtasks_that_are_aggregated(send: Send, gateway: FakeGateway) -> None:
    """Flink's parameters, each of which may come again and again."""
    other = gateway.add_job("1" * 32)
    uptime = "/jobs/metrics?get=uptime&get=numberOfCompletedCheckpoints&agg=MAX&agg=sum"
    (all_jobs, completed), (one, _) = send("GET", uptime).json(), send("GET", f"{uptime}&jobs={JOB.upper()}").json()
    assert set(completed) == {"id", "max", "sum"}
    assert (all_jobs["sum"], one["sum"]) == (2 * one["max"], one["max"])
    assert send("GET", f"{uptime}&jobs={'0' * 32}").json() == []
    assert send("GET", f"{uptime}&jobs={JOB},x").json()["errors"][0].startswith("jobs: 'x' is not acceptable")
    rows = f"/jobs/{JOB}/vertices/{VERTICES[1]}/subtasks/metrics?get=numRecordsIn&agg=sum&subtasks="
    sums = [send("GET", f"{rows}{wanted}").json() for wanted in ("0-1", "0", "1&subtasks=0", "7,1-1", "5-9")]
    whole, first, both, second, none = [answer[0]["sum"] if answer else 0 for answer in sums]
    assert whole == both == first + second
    assert first > 0
    assert none == 0
    for wrong in ("x", "1-", "-1", "1-2-3", "٣"):
        assert send("GET", f"{rows}{wrong}").json()["errors"][0].startswith("subtasks: ")
    other.exceptions = [g.ExceptionEntry(CAUSE, gateway.now)]
    failures = f"/jobs/{'1' * 32}/exceptions"
    shown = [send("GET", failures + query).json()["exceptionHistory"]["entries"] for query in
             ("", "?failureLabelFilter=", "?failureLabelFilter=type:user")]  # fmt: skip
    assert [len(entries) for entries in shown] == [1, 1, 0]


def test_failed_operations_carry_bytes_that_flinks_command_line_can_read() -> None:
    fake = prepared(next(item for item in CONTRACT if item["name"] == "op: checkpoint of a finished job"))
    trigger = next(iter(fake.operations))
    answer = send_to(fake)("GET", f"/v1/jobs/{JOB}/checkpoints/{trigger}").json()
    assert set(answer["operation"]) == {"failureCause"}
    assert answer["operation"]["failureCause"]["serialized-throwable"].startswith("rO0ABXNy")


def test_differences_from_flink_are_documented_and_real() -> None:
    """The lists above hold nothing that the page does not explain, and nothing that is no difference (any more)."""
    assert {line for _, line in DIFFERENCES.values()} | set(NOT_SERVED.values()) <= DOCUMENTED
    recorded = {exchange["name"]: exchange["status"] for exchange in CONTRACT}
    assert [name for name, (status, _) in DIFFERENCES.items() if recorded[name] == status] == []
    for pattern in NOT_SERVED:
        assert any(re.search(pattern, exchange["path"]) for exchange in CONTRACT), pattern


def test_an_unknown_job_is_named_in_flinks_own_words(send: Send) -> None:
    """Tools know it by the first line; behind that Flink has a trace."""
    compared = 0
    for exchange in CONTRACT:
        body = exchange["response_body"]
        reported = body["errors"][0].split("\n")[0] if isinstance(body, dict) and body.get("errors") else ""
        if reported.endswith(f"NotFoundException: Job {UNKNOWN} not found") and "/rescales/" not in exchange["path"]:
            answer = send(exchange["method"], exchange["path"])
            assert (answer.status_code, answer.json()) == (404, {"errors": [reported]}), exchange["name"]
            compared += 1
    assert compared >= 5


@pytest.mark.parametrize("path", ["/overview", "/config"])
def test_version_is_that_of_flinks_api_and_ours_is_a_second_field(send: Send, path: str) -> None:
    recorded = next(exchange for exchange in CONTRACT if exchange["path"] == path)["response_body"]
    assert recorded["flink-version"] == FLINK_VERSION
    assert send("GET", path).json()["ckpt-version"] == VERSION
