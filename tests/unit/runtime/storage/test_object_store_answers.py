"""What an object store answers, or fails to answer, over real HTTP: each outcome is known, or known to be unknown."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace as changed
from typing import Any
from uuid import uuid4

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.storage.duplication import Duplicator
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import (
    ATTEMPTS,
    Location,
    check_bucket,
    delete_empty_directory,
    delete_file,
    delete_tree,
    exists,
    list_names,
    make_directory,
    read_bytes,
    resolve,
)
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.job_store import StoredJob
from ckpt_runtime.storage.publish import publish, replace
from ckpt_runtime.storage.state_files import StateFileWriter
from tests.support.object_store import ObjectStore, Wanted, keys, unfinished_uploads

JOB = "0123456789abcdef" * 2
PLAN = StoredJob(JOB, {"name": "words"}, {"execution.checkpointing.interval": "1 s"})
MIB = 1 << 20


@pytest.fixture
def directory(bucket: str) -> Location:
    return resolve(f"{bucket}/{uuid4().hex}")


def puts(name: str) -> Wanted:
    return lambda method, path: method == "PUT" and name in path


def gets(name: str) -> Wanted:
    return lambda method, path: method == "GET" and name in path


def everything(name: str) -> Wanted:
    return lambda _, path: name in path


# --- puts


@pytest.mark.parametrize("write", [publish, replace])
@pytest.mark.parametrize("silent", [False, True], ids=["500", "no answer"])
def test_a_put_whose_answer_is_lost_is_found_to_have_succeeded(
    s3: ObjectStore, directory: Location, write: Callable[[Location, bytes], None], silent: bool
) -> None:
    file = directory.child("file")
    with s3.failing(puts("file"), times=1, status=500, code="InternalError", takes_effect=True, silent=silent) as fault:
        write(file, b"content")
    assert fault.met == 1
    assert read_bytes(file, 100) == b"content"


@pytest.mark.parametrize("write", [publish, replace])
def test_a_put_that_only_ever_fails_after_it_took_effect_has_succeeded(
    s3: ObjectStore, directory: Location, write: Callable[[Location, bytes], None]
) -> None:
    with s3.failing(puts("file"), takes_effect=True):
        write(directory.child("file"), b"content")


@pytest.mark.parametrize("write", [publish, replace])
def test_a_put_that_may_still_arrive_is_ambiguous(
    s3: ObjectStore, directory: Location, write: Callable[[Location, bytes], None]
) -> None:
    with (
        s3.failing(puts("file")),
        pytest.raises(AmbiguousWriteError, match="file was written: ServiceUnavailable: as the test wants it"),
    ):
        write(directory.child("file"), b"content")
    write(directory.child("file"), b"content")


def test_a_put_that_finds_a_file_which_cannot_be_read_may_have_found_its_own(
    s3: ObjectStore, directory: Location
) -> None:
    file = directory.child("file")
    publish(file, b"content")
    with (
        s3.failing(lambda method, path: method == "GET" and path.endswith("/file")),
        pytest.raises(AmbiguousWriteError),
    ):
        publish(file, b"content")
    with pytest.raises(AlreadyExistsError, match="it already exists"):
        publish(file, b"other content")


def test_a_precondition_that_failed_without_saying_which_is_an_existing_file(
    s3: ObjectStore, directory: Location
) -> None:
    file = directory.child("file")
    publish(file, b"content")
    with s3.failing(puts("file"), status=412, code="PreconditionFailed"), pytest.raises(AlreadyExistsError):
        publish(file, b"other")
    assert read_bytes(file, 100) == b"content"


def test_a_put_that_met_another_one_is_tried_again(s3: ObjectStore, directory: Location) -> None:
    with s3.failing(puts("file"), times=3, status=409, code="ConditionalRequestConflict") as fault:
        publish(directory.child("file"), b"content")
    assert fault.met == 3
    assert read_bytes(directory.child("file"), 100) == b"content"


@pytest.mark.parametrize(("status", "code"), [(403, "AccessDenied"), (400, "InvalidRequest"), (404, "NoSuchBucket")])
def test_a_refused_put_certainly_had_no_effect(s3: ObjectStore, directory: Location, status: int, code: str) -> None:
    with (
        s3.failing(puts("file"), status=status, code=code),
        pytest.raises(StorageError, match="cannot write .*as the test wants it") as refused,
    ):
        publish(directory.child("file"), b"content")
    assert not isinstance(refused.value, AmbiguousWriteError)


def test_refusal_after_a_lost_answer_leaves_the_outcome_unknown(s3: ObjectStore, directory: Location) -> None:
    """The credentials end between an attempt that was written and its repetition, and nothing can be read."""
    file = directory.child("file")
    with (
        s3.failing(puts("file"), times=1, status=500, code="InternalError", takes_effect=True),
        s3.failing(everything("file"), status=403, code="ExpiredToken"),
        pytest.raises(AmbiguousWriteError),
    ):
        publish(file, b"content")
    assert read_bytes(file, 100) == b"content"


def test_refusal_after_attempts_without_an_answer_leaves_the_outcome_unknown(
    s3: ObjectStore, directory: Location
) -> None:
    file = directory.child("file")
    with (
        s3.failing(puts("file"), times=1, takes_effect=True, silent=True),
        s3.failing(everything("file"), status=403, code="ExpiredToken"),
        pytest.raises(AmbiguousWriteError),
    ):
        publish(file, b"content")
    assert read_bytes(file, 100) == b"content"


# --- what is repeated, and what is not

REPEATED: dict[str, dict[str, Any]] = {
    "500": {"status": 500, "code": "InternalError"},
    "503": {},
    "throttled": {"status": 503, "code": "SlowDown"},
    "too many": {"status": 429, "code": "TooManyRequests"},
    "no answer": {"silent": True},
    "reset": {"cut": True},
}


def _written(directory: Location) -> None:
    with StateFileWriter(directory.child("written"), 0) as writer:
        writer.write(b"state")
        writer.finish()


def _copied(directory: Location) -> None:
    file = directory.child("file")
    Duplicator(directory.child("copies"), copies_only=False).duplicate(file, StateFile(file.url, 7, ""))


ACTIONS: dict[str, Callable[[Location], object]] = {
    "read": lambda directory: read_bytes(directory.child("file"), 100),
    "list": list_names,
    "look": lambda directory: exists(directory.child("file")),
    "delete": lambda directory: delete_file(directory.child("another")),
    "write": _written,
    "copy": _copied,
}


def _its_requests(action: str) -> Wanted:
    """A write or a copy that has failed deletes what may be there all the same."""
    return puts("/") if action in ("write", "copy") else everything("/")


@pytest.mark.parametrize("fault", REPEATED)
def test_a_passing_fault_is_not_noticed(s3: ObjectStore, directory: Location, fault: str) -> None:
    publish(directory.child("file"), b"content")
    with s3.failing(everything("/"), times=1, **REPEATED[fault]) as met:
        assert read_bytes(directory.child("file"), 100) == b"content"
    assert met.met == 1


@pytest.mark.parametrize(
    ("fault", "action"),
    [*((fault, "read") for fault in REPEATED), *(("503", action) for action in ACTIONS if action != "read")],
)
def test_a_lasting_fault_is_reported_after_the_attempts_of_the_client_library(
    s3: ObjectStore, directory: Location, fault: str, action: str
) -> None:
    """No other layer repeats what it has given up on."""
    publish(directory.child("file"), b"content")
    with s3.failing(_its_requests(action), **REPEATED[fault]) as met, pytest.raises(StorageError, match=directory.url):
        ACTIONS[action](directory)
    attempts = int(os.environ["AWS_MAX_ATTEMPTS"])
    # A request on a connection that was kept open is sent once more by the HTTP client, which cannot know it was read.
    assert attempts <= met.met <= (2 * attempts if fault == "reset" else attempts)


@pytest.mark.parametrize(
    ("status", "code", "action"),
    [
        *((403, "AccessDenied", action) for action in ACTIONS),
        *((404, "NoSuchBucket", action) for action in ("read", "list", "delete", "write")),
    ],
)
def test_a_refusal_is_not_asked_for_again(
    s3: ObjectStore, directory: Location, status: int, code: str, action: str
) -> None:
    publish(directory.child("file"), b"content")
    with s3.failing(_its_requests(action), status=status, code=code) as met, suppress(StorageError):
        ACTIONS[action](directory)
    assert met.met == 1


@pytest.mark.parametrize("times", [1, ATTEMPTS - 1])
def test_an_answer_that_breaks_off_is_read_again(s3: ObjectStore, directory: Location, times: int) -> None:
    publish(directory.child("file"), bytes(MIB))
    with s3.failing(gets("file"), times=times, takes_effect=True, cut=True) as met:
        assert read_bytes(directory.child("file"), MIB) == bytes(MIB)
    assert met.met == times


def test_answers_that_always_break_off_are_reported(s3: ObjectStore, directory: Location) -> None:
    publish(directory.child("file"), bytes(MIB))
    with (
        s3.failing(gets("file"), takes_effect=True, cut=True) as met,
        pytest.raises(StorageError, match="cannot read s3://"),
    ):
        read_bytes(directory.child("file"), MIB)
    assert met.met == ATTEMPTS


# --- the high-availability directory


@pytest.mark.row("571.5")
def test_a_change_whose_answer_is_lost_is_made_once(s3: ObjectStore, directory: Location) -> None:
    store = HaStore(directory)
    store.jobs.put(PLAN)
    with s3.failing(puts("/plan/"), times=1, status=500, code="InternalError", takes_effect=True) as fault:
        made = store.jobs.update(JOB, lambda job: changed(job, version=job.version + 1))
    assert fault.met == 1
    assert made.version == 2
    assert HaStore(directory).jobs.get(JOB) == made


@pytest.mark.row("571.5")
def test_the_overrides_of_an_unknown_outcome_are_there_when_the_store_answers_again(
    s3: ObjectStore, directory: Location
) -> None:
    store = HaStore(directory)
    store.jobs.put(PLAN)

    def override(job: StoredJob) -> StoredJob:
        return changed(job, configuration={**job.configuration, JOB_CHECKPOINT_OVERRIDES: '{"timeout":1}'})

    with s3.failing(everything("/plan/00000000000000000002"), takes_effect=True), pytest.raises(AmbiguousWriteError):
        store.jobs.update(JOB, override)
    assert store.jobs.get(JOB).checkpoint_overrides == '{"timeout":1}'


def test_a_claim_whose_answer_is_lost_is_known_to_be_won(s3: ObjectStore, directory: Location) -> None:
    leader = HaStore(directory).leader
    with s3.failing(puts("/leader/"), times=1, takes_effect=True):
        first = leader.claim("http://a", "app-a", "1", after=0)
    assert leader.current() == first
    with s3.failing(puts("/leader/"), times=1, takes_effect=True):
        second = leader.claim("http://b", "app-b", "2", after=1)
    assert second.epoch == 2
    with pytest.raises(NotLeaderError, match="no longer leads, app-b"):
        leader.check(first)


def test_a_store_that_ignores_conditions_is_refused(s3: ObjectStore, directory: Location) -> None:
    s3.honours_conditions = False
    try:
        with pytest.raises(InvalidLocationError, match="a conditional put replaced a file"):
            HaStore(directory).leader.prepare()
    finally:
        s3.honours_conditions = True
    HaStore(directory).leader.prepare()
    assert keys(directory.url) == []


def test_a_store_that_knows_no_conditions_is_refused(s3: ObjectStore, directory: Location) -> None:
    with (
        s3.failing(puts("trial-"), status=501, code="NotImplemented"),
        pytest.raises(InvalidLocationError, match="cannot create a file only if it is absent"),
    ):
        HaStore(directory).leader.prepare()


# --- buckets and directories


def test_a_bucket_is_neither_made_nor_deleted(s3: ObjectStore) -> None:
    nowhere = resolve(f"s3://no-{uuid4().hex}/ha")
    make_directory(nowhere)
    with pytest.raises(NotFoundError, match=f"cannot use s3://{nowhere.path.partition('/')[0]}"):
        check_bucket(nowhere)
    with pytest.raises(StorageError, match="bucket does not exist"):
        HaStore(nowhere).leader.prepare()
    with pytest.raises(NotFoundError):
        check_bucket(nowhere)
    bucket = resolve(s3.bucket())
    assert delete_empty_directory(bucket)
    with pytest.raises(StorageError, match="it is a whole bucket"):
        delete_tree(bucket)
    check_bucket(bucket)


@pytest.mark.parametrize("url", ["s3://", "s3:///", "s3a://"])
def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidLocationError, match="with a bucket"):
        resolve(url)


def test_a_directory_is_deleted_and_no_other_whose_name_begins_with_its_own(directory: Location) -> None:
    for name in ("chk-1", "chk-10"):
        publish(directory.child(name, "state"), b"state")
    delete_tree(directory.child("chk-1"))
    assert keys(directory.url) == ["chk-10/state"]


def test_a_listing_in_several_pages_is_complete(directory: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    names = [f"{number:04}" for number in range(25)]
    for name in names:
        publish(directory.child(name), b"x")
    assert list_names(directory) == names
    delete_tree(directory)
    assert not exists(directory)


def test_files_that_others_write_and_delete_are_seen_at_once(directory: Location) -> None:
    assert list_names(directory) == []
    assert not exists(directory.child("file"))
    from s3fs import S3FileSystem

    other = S3FileSystem(skip_instance_cache=True)  # with a cache of its own, as in another process
    other.touch(directory.child("file").path)
    assert list_names(directory) == ["file"]
    assert exists(directory.child("file"))
    assert read_bytes(directory.child("file"), 10) == b""
    other.rm_file(directory.child("file").path)
    assert list_names(directory) == []
    assert not exists(directory.child("file"))


# --- state files


def test_a_state_file_given_up_is_never_seen_and_leaves_no_upload(directory: Location) -> None:
    with StateFileWriter(directory, 0) as writer:
        for _ in range(12):
            writer.write(bytes(MIB))
        assert unfinished_uploads(directory) == [writer.location.path.partition("/")[2]]
        assert keys(directory.url) == []
    assert unfinished_uploads(directory) == []
    assert keys(directory.url) == []


def test_state_file_that_can_be_neither_written_nor_deleted_raises_the_first_error(
    s3: ObjectStore, directory: Location
) -> None:
    with s3.failing(everything("/")), pytest.raises(StorageError, match="cannot write s3://"):
        _written(directory)


def test_a_small_state_file_given_up_is_never_put(s3: ObjectStore, directory: Location) -> None:
    before = s3.requests["PUT", "200"]
    with StateFileWriter(directory, 0) as writer:
        writer.write(b"state")
    assert s3.requests["PUT", "200"] == before
    assert keys(directory.url) == []


def test_a_process_that_used_a_store_ends_without_a_word(directory: Location) -> None:
    program = (
        "import sys, threading\n"
        "from ckpt_runtime.storage.filesystem import resolve, read_bytes\n"
        "from ckpt_runtime.storage.publish import publish\n"
        "file = resolve(sys.argv[1])\n"
        "thread = threading.Thread(target=publish, args=(file, b'content'))\n"
        "thread.start(); thread.join()\n"
        "assert read_bytes(file, 100) == b'content'\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-W", "always", "-c", program, directory.child("file").url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
