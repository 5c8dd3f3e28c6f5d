"""Format ``parquet`` on S3: its files are uploads that stay open until their commit."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.asyn import sync_wrapper
from s3fs import S3FileSystem

from ckpt_runtime.checkpoint.completed_checkpoint import OperatorListState
from ckpt_runtime.checkpoint.sink_state import SinkLineage
from ckpt_runtime.connectors import open_uploads
from ckpt_runtime.connectors.file_sink import FileSink
from ckpt_runtime.connectors.part_directory import CommitError, find_hidden_files, remove_hidden_file
from ckpt_runtime.connectors.sink_operators import CommittingSinkOperator
from ckpt_runtime.storage.filesystem import resolve
from tests.support.object_store import ObjectStore, keys, unfinished_uploads
from tests.unit.runtime.connectors.harness import SINK, context, opened, snapshot_of


class Ended(Exception):
    """The process has ended: no request of it is sent."""


@contextmanager
def ending(at: int) -> Iterator[list[str]]:
    """The process ends when this request, counted from 0, has been served, and before it hears of the answer."""
    seen: list[str] = []
    call = S3FileSystem._call_s3

    async def counted(self: Any, method: str, *arguments: Any, **named: Any) -> Any:
        place = len(seen)
        seen.append(method)
        if place > at:
            raise Ended
        answer = await call(self, method, *arguments, **named)
        if place == at:
            raise Ended
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(S3FileSystem, "_call_s3", counted)
        patch.setattr(S3FileSystem, "call_s3", sync_wrapper(counted))
        yield seen


def sink(url: str) -> CommittingSinkOperator:
    return CommittingSinkOperator(FileSink("parquet", {"path": url, "partitionBy": "part"}))


def rows(n: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array([n], pa.int64()), "part": ["a b%é\u00a0"]})


def visible(url: str) -> list[int]:
    """The numbers in all visible files, whose directory is that of their partition."""
    location, found = resolve(url), []
    for key in keys(url):
        if not key.startswith("."):
            assert key.startswith("part=a b%25é\u00a0/part-"), key
            with location.filesystem.open(f"{location.path}/{key}") as file:
                found += pq.ParquetFile(file).read().column("n").to_pylist()
    return sorted(found)


def left(url: str) -> list[str]:
    return [key for key in keys(url) if key.startswith(".")] + unfinished_uploads(resolve(url))


@pytest.mark.row("ends.5")
def test_rows_are_visible_once_when_the_process_ends_behind_any_request(s3: ObjectStore) -> None:
    """The next attempt begins with the newest completed checkpoint, and writes what that does not cover again."""
    requests = through_an_end(s3, sys.maxsize)
    changes = [at for at, method in enumerate(requests) if not method.startswith(("get", "head", "list"))]
    assert [requests[at] for at in changes] == [
        "put_object",
        "create_multipart_upload",
        "upload_part",
        "put_object",
        "delete_object",
        "complete_multipart_upload",
        "delete_object",
    ]
    for at in changes:
        through_an_end(s3, at)


def through_an_end(s3: ObjectStore, at: int) -> list[str]:
    """Writes two rows, the process of the first one ending behind a request. Returns the requests of this process."""
    url, completed = s3.bucket() + "/out", 0
    state: tuple[OperatorListState, ...] = ()
    with ending(at) as requests:
        try:
            writer = sink(url)
            opened(writer, context())
            writer.process_batch(rows(1), 0)
            state, completed = snapshot_of(writer, 1), 1
            writer.notify_complete(1)
        except Exception:
            assert len(requests) > at
    again = sink(url)
    opened(again, context(attempt=1, state=state, restored=completed or None))
    assert (visible(url), left(url)) == ([1] * completed, []), requests
    for n in range(completed + 1, 3):
        again.process_batch(rows(n), 0)
        snapshot_of(again, n)
        again.notify_complete(n)
    again.close()
    assert (visible(url), left(url)) == ([1, 2], []), requests
    return requests


@pytest.mark.row("147.8")
def test_savepoint_is_committed_once_by_the_job_that_took_it_and_one_that_starts_from_it(s3: ObjectStore) -> None:
    url = s3.bucket() + "/out"
    first, second = sink(url), sink(url)
    opened(first, context())
    first.process_batch(rows(1), 0)
    savepoint = snapshot_of(first, 1)
    opened(second, context(job_id="e" * 32, state=savepoint, restored=1))
    assert visible(url) == [1]
    first.process_batch(rows(2), 0)
    snapshot_of(first, 2)
    first.notify_complete(2)
    first.close()
    second.close()
    assert (visible(url), left(url)) == ([1, 2], [])


def test_parts_of_a_large_file_are_sent_before_its_end(s3: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_uploads, "PART_BYTES", 5 << 20)
    target = resolve(s3.bucket() + "/large")
    upload = open_uploads.OpenUpload(target)
    block = bytes(range(256)) * 4096
    for _ in range(11):
        upload.write(block)
    assert len(upload.tags) == 2
    upload.finish()
    assert open_uploads.complete_upload(target, upload.upload, upload.tags) is True
    with unknown_uploads(s3):
        assert open_uploads.complete_upload(target, upload.upload, upload.tags) is False
        assert open_uploads.complete_upload(resolve(f"{target.url}-2"), upload.upload, upload.tags) is None
    assert target.filesystem.cat_file(target.path) == block * 11


def unknown_uploads(s3: ObjectStore) -> AbstractContextManager[Any]:
    """As S3 answers for an upload that was completed long ago, or given up; moto answers otherwise."""
    return s3.failing(lambda method, _: method == "POST", status=404, code="NoSuchUpload")


def test_upload_that_the_store_has_given_up_fails_the_restore_and_names_the_file(s3: ObjectStore) -> None:
    """A lifecycle rule of the bucket does so."""
    url = s3.bucket() + "/out"
    writer = sink(url)
    opened(writer, context())
    writer.process_batch(rows(1), 0)
    state = snapshot_of(writer, 1)
    missing = r"checkpoint 1: neither the pending file .*c1\.parquet\.pending nor its"
    with unknown_uploads(s3), pytest.raises(CommitError, match=missing):
        opened(sink(url), context(attempt=1, state=state, restored=1))


def test_uploads_of_ended_jobs_are_given_up_with_the_hidden_objects_that_name_them(s3: ObjectStore) -> None:
    """By a job that continues, and by a user who removes leftovers."""
    for remove in (True, False):
        url = s3.bucket() + "/out"
        writer = sink(url)
        opened(writer, context())
        for n in (1, 2):
            writer.process_batch(rows(n), 0)
            writer.prepare_snapshot(n)
            writer.snapshot(n)
        writer.process_batch(rows(3), 0)
        assert len(unfinished_uploads(resolve(url))) == 3
        if remove:
            for file in find_hidden_files(url):
                remove_hidden_file(url, file)
        else:
            lineage = SinkLineage(SINK.sink_id, ended_jobs=(context().job_id,))
            opened(sink(url), context(job_id="e" * 32, sink=lineage))
        assert (visible(url), left(url)) == ([], [])
