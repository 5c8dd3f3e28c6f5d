"""Uploading, listing, deleting and running pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from ckpt_runtime.configuration.checkpointing_options import RecoveryClaimMode
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.rest.exchange import BadRequest, display_name
from tests.unit.runtime.rest.conftest import Send
from tests.unit.runtime.rest.fake_gateway import FakeGateway

ZIP = b"PK\x03\x04rest"


def upload(send: Send, name: str = "job.py", content: bytes = b"x = 1") -> str:
    response = send("POST", "/jars/upload", files={"jarfile": (name, content)})
    assert response.status_code == 200, response.text
    filename: str = response.json()["filename"]
    return filename.rsplit("/", maxsplit=1)[-1]


def test_upload_list_run_delete(send: Send, gateway: FakeGateway) -> None:
    pipeline = upload(send, "pipeline.zip", ZIP)
    assert gateway.contents[pipeline] == ZIP
    files = send("GET", "/jars").json()["files"]
    assert [(item["id"], item["name"]) for item in files] == [(pipeline, "pipeline.zip")]
    body = {
        "entryClass": "pkg.job:main", "programArgsList": ["--a", "ä b"], "parallelism": 3, "jobId": "AB" * 16,
        "savepointPath": "s3://b/s", "allowNonRestoredState": True, "restoreMode": "claim",
        "flinkConfiguration": {"a": "1", "b": 2, "c": True, "d": 1.5},
    }  # fmt: skip
    run = send("POST", f"/v1/jars/{pipeline}/run", json=body)
    assert run.json() == {"jobid": "ab" * 16, "applicationId": "ab" * 16}
    assert gateway.jobs["ab" * 16].request == RunRequest(
        pipeline, "pkg.job:main", ("--a", "ä b"), 3, {"a": "1", "b": "2", "c": "true", "d": "1.5"}, "s3://b/s", True,
        RecoveryClaimMode.CLAIM, "ab" * 16,
    )  # fmt: skip
    assert send("DELETE", f"/jars/{pipeline}").status_code == 200
    assert send("DELETE", f"/jars/{pipeline}").status_code == 404
    assert send("POST", f"/jars/{pipeline}/run").status_code == 404


@pytest.mark.parametrize(
    ("raw", "shown"), [("../../etc/x.py", "x.py"), ("C:\\a\\b.zip", "b.zip"), ("ä b.PY", "ä b.PY")]
)
def test_directories_in_file_names_are_dropped(raw: str, shown: str) -> None:
    assert display_name(raw) == shown


@pytest.mark.parametrize(
    "raw", [None, "", "x.jar", ".py", "..", "a\nb.py", "x.py\x00", "x" * 300 + ".py", "a/", "x.py ", ".hidden.py"]
)
def test_other_file_names_are_refused(raw: str | None) -> None:
    with pytest.raises(BadRequest):
        display_name(raw)


@pytest.mark.parametrize(
    "arguments",
    [
        {}, {"content": b"x"}, {"json": {}}, {"data": {"jarfile": "text"}}, {"files": {"other": ("a.py", b"x")}},
        {"files": {"jarfile": ("a.jar", b"x")}}, {"files": {"jarfile": ("a.py", b"")}},
        {"files": {"jarfile": ("a.zip", b"no zip")}},
        {"files": [("jarfile", ("a.py", b"x")), ("jarfile", ("b.py", b"x"))]},
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        {"content": b"--b\r\n", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"garbage", "headers": {"content-type": "multipart/form-data; boundary=b"}},
        {"content": b"--b\r\n\r\n", "headers": {"content-type": "multipart/form-data; boundary=b; charset=nosuch"}},
    ],
)  # fmt: skip
def test_malformed_uploads_are_400(send: Send, gateway: FakeGateway, arguments: dict[str, Any]) -> None:
    response = send("POST", "/jars/upload", **arguments)
    assert response.status_code == 400, response.text
    assert list(response.json()) == ["errors"]
    assert not gateway.pipelines


def test_the_size_limit(send: Send, gateway: FakeGateway) -> None:
    response = send("POST", "/jars/upload", files={"jarfile": ("a.py", b"x" * 200_000)})
    assert response.status_code == 413
    assert not gateway.pipelines


@pytest.mark.parametrize("bad", ["..", "%2e%2e", ".hidden", "a%2fb", "a%5cb", "a%00", "x" * 300, "a b"])
def test_pipeline_ids_cannot_be_paths(send: Send, bad: str) -> None:
    assert send("DELETE", f"/jars/{bad}").status_code in (400, 404)
    assert send("POST", f"/jars/{bad}/run").status_code in (400, 404)
