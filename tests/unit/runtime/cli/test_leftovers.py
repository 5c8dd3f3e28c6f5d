"""``ckpt leftovers``: which hidden files it calls left over, and which it deletes."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    OperatorSubtaskState,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.cli.main import main
from ckpt_runtime.connectors.file_sink import FileSink
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import write_metadata
from tests.unit.runtime.connectors.harness import context, opened, snapshot_of
from tests.unit.runtime.rest.fake_gateway import FakeGateway

RUNNING, ENDED, UNKNOWN = "a" * 32, "b" * 32, "c" * 32
Ckpt = Callable[..., int]
_KILLED: list[CommittingSinkOperator] = []
"""Kept: one that is collected still writes to its file."""

# A sink that was killed leaves its files as they are.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed file")


@pytest.fixture
def ckpt(url: str, gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Ckpt:
    monkeypatch.setenv("CKPT_REST_URL", url)
    monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / "session.json"))
    gateway.add_job(RUNNING)
    gateway.add_job(ENDED)
    gateway.move(ENDED, JobStatus.CANCELED)
    return lambda *arguments: main(arguments)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def killed_sink(out: Path, job_id: str) -> Any:
    """One file waits for checkpoint 5, one is open; both are two days old. Returns the state of checkpoint 5."""
    writer = CommittingSinkOperator(FileSink("parquet", {"path": str(out)}))
    _KILLED.append(writer)
    opened(writer, context(job_id=job_id))
    rows = pa.record_batch({"n": pa.array([1, 2, 3])})
    writer.process_batch(rows, 0)
    state = snapshot_of(writer, 5)
    writer.process_batch(rows, 0)
    old = time.time() - 2 * 86400
    for file in out.iterdir():
        if job_id in file.name:
            os.utime(file, (old, old))
    return state


def listed(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, int | None], str | None]:
    """By job and checkpoint: why a file is kept, None for what is left over."""
    return {
        (file["job_id"], file["checkpoint_id"]): file["kept_because"] for file in json.loads(capsys.readouterr().out)
    }


def names(out: Path) -> set[str]:
    return {file.name for file in out.iterdir()}


def test_leftovers_are_not_deleted_without_remove(ckpt: Ckpt, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job_id in (RUNNING, ENDED, UNKNOWN):
        killed_sink(out, job_id)
    before = names(out)
    assert ckpt("leftovers", str(out), "--json") == 0
    waits = "snapshots from 5 on may need it"
    assert listed(capsys) == {
        (RUNNING, None): "the job is RUNNING",
        (RUNNING, 5): "the job is RUNNING",
        (ENDED, None): None,
        (ENDED, 5): waits,
        (UNKNOWN, None): None,
        (UNKNOWN, 5): waits,
    }
    assert names(out) == before


def test_remove_deletes_only_leftovers(ckpt: Ckpt, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for job_id in (RUNNING, ENDED):
        killed_sink(out, job_id)
    (out / "part-of-another.parquet").touch()
    (out / ".hidden.parquet.inprogress").touch()
    before = names(out)
    assert ckpt("leftovers", str(out), "--remove", "--pending") == 0
    assert "removed" in capsys.readouterr().out
    assert names(out) == {name for name in before if ENDED not in name}


def test_a_younger_file_stays(ckpt: Ckpt, out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    killed_sink(out, ENDED)
    assert ckpt("leftovers", str(out), "--older-than", "3 d", "--pending", "--json") == 0
    assert set(listed(capsys).values()) == {"it is too young"}


def test_files_covered_by_a_snapshot_are_kept(
    ckpt: Ckpt, out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = killed_sink(out, ENDED)
    subtask = SubtaskState({"op": OperatorSubtaskState(lists=tuple(state))})
    savepoint = tmp_path / "savepoint"
    savepoint.mkdir()
    vertex = VertexDescriptor("e" * 32, "Out", ("op",), 1, 128)
    taken = CompletedCheckpoint(
        5, ENDED, 0, 0, savepoint.as_uri(), CheckpointProperties(), (vertex,), states={(vertex.id, 0): subtask}
    )
    write_metadata(resolve(str(savepoint)), taken.to_json())
    assert ckpt("leftovers", str(out), "--pending", "--keep", str(savepoint), "--remove", "--json") == 0
    assert listed(capsys) == {(ENDED, None): None, (ENDED, 5): "a snapshot given with --keep covers it"}
    assert [name.rsplit(".", 1)[-1] for name in names(out)] == ["pending"]


def test_errors_delete_nothing(
    ckpt: Ckpt, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_sink(out, ENDED)
    before = names(out)
    assert ckpt("leftovers", str(out / "elsewhere"), "--remove") == 1
    assert "the directory does not exist" in capsys.readouterr().err
    assert ckpt("leftovers", str(out), "--remove", "--keep", str(out)) == 1
    assert ckpt("leftovers", str(out), "--remove", "--older-than", "soon") == 2
    assert ckpt("leftovers", str(out), "--remove", "--url", "http://127.0.0.1:9") == 3
    assert names(out) == before


def test_age_decides_about_leftovers_without_a_job_manager(
    ckpt: Ckpt, out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("CKPT_REST_URL")
    killed_sink(out, RUNNING)
    assert ckpt("leftovers", str(out)) == 0
    captured = capsys.readouterr()
    assert "left over" in captured.out
    assert "no job manager is known" in captured.err
    assert "1 of 2 hidden files are left over" in captured.err
