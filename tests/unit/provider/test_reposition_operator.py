"""A savepoint whose source gets another position as a task: the tool on the worker does it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pyarrow as pa
import pytest

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptRequestRejected, CkptTargetExists
from airflow_provider_ckpt.operators.snapshots import RepositionSavepointOperator
from ckpt_runtime.snapshots.inspection import summarized
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.filesystem import make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from tests.unit.runtime.connectors.split_jobs import Job, metadata_of

LINES = pa.schema([("value", pa.string())])


@pytest.fixture
def savepoint(tmp_path: Path) -> str:
    directory = resolve(str(tmp_path / "savepoint"))
    make_directory(directory)
    with closing(Job("text", {"path": str(tmp_path)}, LINES)) as job:
        write_metadata(directory, metadata_of(job.checkpoint(1), directory.url).to_json())
    return directory.url


@pytest.mark.row("ends.7")
@pytest.mark.usefixtures("commands_in_this_process")
def test_a_savepoint_is_made_once_and_refusals_are_not_retried(savepoint: str, tmp_path: Path) -> None:
    def operator(position: object, uid: str = "orders") -> RepositionSavepointOperator:
        target = str(tmp_path / "new")
        return RepositionSavepointOperator(
            task_id="t", savepoint_path={"savepoint_path": savepoint}, uid=uid, position=position, target=target
        )

    with pytest.raises(CkptRequestRejected, match="no source 'payments' whose position can be set"):
        operator("latest", uid="payments").execute({})
    with pytest.raises(CkptRequestRejected, match="its format takes earliest, latest, timestamp"):
        operator({"topic": {"0": 1}}).execute({})
    with pytest.raises(CkptArgumentInvalid, match="position"):
        operator("").execute({})
    assert not (tmp_path / "new").exists()
    made = operator("1970-01-01T01:00").execute({})
    assert {name: made[name] for name in ("made_of", "uid", "position")} == {
        "made_of": savepoint,
        "uid": "orders",
        "position": "1970-01-01T01:00:00+00:00",
    }
    assert summarized(open_snapshot(made["savepoint_path"])).repositioned == {"orders": made["position"]}
    assert operator("1970-01-01T02:00+01:00").execute({}) == made
    with pytest.raises(CkptTargetExists):
        operator("latest").execute({})
