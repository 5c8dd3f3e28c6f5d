"""Files duplicated within an object store, over real HTTP: nothing of them passes through this machine."""

from __future__ import annotations

from uuid import uuid4

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.checkpoint.properties import CheckpointOptions, CheckpointProperties, CheckpointType
from ckpt_runtime.storage.duplication import Means
from ckpt_runtime.storage.filesystem import Location, list_names, read_bytes, resolve
from ckpt_runtime.storage.state_files import StateFileWriter
from ckpt_runtime.task.snapshot_files import NewFiles
from tests.support.object_store import ObjectStore

FILES = 20
CONTENT = b"table file" * 10_000


class Job:
    """Shared files of a checkpoint, and a savepoint, in one bucket."""

    def __init__(self, directory: Location) -> None:
        self.shared = directory.child("shared")
        self.savepoint = directory.child("savepoint")
        options = CheckpointOptions(CheckpointProperties(CheckpointType.SAVEPOINT), self.savepoint.url)
        self.files = NewFiles(options, 0)

    def uploaded(self, content: bytes) -> StateFile:
        with StateFileWriter(self.shared, 0) as writer:
            writer.write(content)
            file = writer.finish()
        return StateFile(writer.location.url, file.length, file.checksum)


@pytest.fixture
def job(bucket: str) -> Job:
    return Job(resolve(f"{bucket}/{uuid4().hex}"))


def test_the_store_copies_by_itself(s3: ObjectStore, job: Job) -> None:
    sources = {f"{number}.sst": job.uploaded(CONTENT + bytes([number])) for number in range(FILES)}
    before = s3.requests.copy()
    copies = job.files.duplicate_all(sources)
    asked = s3.requests - before
    assert asked["COPY", "200"] == FILES
    assert asked["GET", "200"] == asked["GET", "206"] == asked["PUT", "200"] == asked["POST", "200"] == 0
    assert job.files.duplicated == {Means.SERVER_SIDE_COPY: FILES}
    assert list_names(job.savepoint) == sorted(file.path for file in copies.values())
    for name, file in copies.items():
        assert read_bytes(job.savepoint.child(file.path), 1 << 20) == CONTENT + bytes([int(name.split(".")[0])])
        assert (file.length, file.checksum) == (sources[name].length, sources[name].checksum)


def test_a_failed_copy_is_retried_and_the_file_is_rewritten_when_all_retries_fail(s3: ObjectStore, job: Job) -> None:
    lucky, unlucky, gone = (job.uploaded(CONTENT) for _ in range(3))
    missing = StateFile(gone.path + "-gone", gone.length, gone.checksum)
    damaged = StateFile(gone.path, gone.length + 1, gone.checksum)
    files = {"lucky": lucky, "missing": missing, "damaged": damaged}

    def looks(file: StateFile) -> str:
        return resolve(file.path).path

    with s3.failing(lambda method, path: method == "HEAD" and looks(lucky) in path, times=1) as fault:
        copies = job.files.duplicate_all(files)
    assert fault.met == 1
    assert copies.keys() == {"lucky"}
    with s3.failing(lambda method, path: method == "HEAD" and looks(unlucky) in path):
        assert job.files.duplicate_all({"unlucky": unlucky}) == {}
    assert list_names(job.savepoint) == [copies["lucky"].path]


def test_a_copy_whose_answer_is_lost_leaves_nothing(s3: ObjectStore, job: Job) -> None:
    source = job.uploaded(CONTENT)
    with s3.failing(lambda method, _: method == "PUT", takes_effect=True):
        assert job.files.duplicate_all({"source": source}) == {}
    assert list_names(job.savepoint) == []


def test_discarded_copies_leave_their_sources(s3: ObjectStore, job: Job) -> None:
    source = job.uploaded(CONTENT)
    job.files.duplicate_all({"source": source})
    job.files.discard()
    assert list_names(job.savepoint) == []
    assert list_names(job.shared) == [resolve(source.path).name]
