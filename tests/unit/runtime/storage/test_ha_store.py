"""The high-availability directory: jobs, pointers, ids, results and the leader, under races and damage."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from ckpt_runtime.configuration.registry import JOB_CHECKPOINT_OVERRIDES
from ckpt_runtime.storage import leader_store, versioned_document
from ckpt_runtime.storage.checkpoint_pointer_store import CheckpointPointer, Counters
from ckpt_runtime.storage.errors import (
    AlreadyExistsError,
    AmbiguousWriteError,
    ConflictError,
    CorruptFileError,
    InvalidLocationError,
    NotFoundError,
    NotLeaderError,
    StorageError,
)
from ckpt_runtime.storage.filesystem import Location, delete_file, delete_tree, list_names, read_bytes
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.job_store import StoredJob
from ckpt_runtime.storage.leader_store import LeaderInfo
from ckpt_runtime.storage.publish import publish
from ckpt_runtime.storage.publish import replace as replace_file
from ckpt_runtime.storage.versioned_document import VersionedDocument, decode_document, encode_document

JOB = "0123456789abcdef" * 2
OTHER = "fedcba9876543210" * 2
PLAN = StoredJob(JOB, {"name": "words"}, {"execution.checkpointing.interval": "1 s"}, properties={"entry": "a:b"})


@pytest.fixture
def root(base: Location) -> Location:
    return base.child("ha")


@pytest.fixture
def store(root: Location) -> HaStore:
    return HaStore(root)


def run_together(*calls: Callable[[], object]) -> list[object]:
    """Runs all calls at the same time and returns what each returned or raised."""
    outcomes: list[object] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def run(index: int) -> None:
        barrier.wait()
        try:
            outcomes[index] = calls[index]()
        except Exception as error:
            outcomes[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def test_a_new_driver_finds_the_jobs_of_the_old_one(store: HaStore, root: Location) -> None:
    assert store.jobs.list_ids() == []
    stored = store.jobs.put(PLAN, b"archive")
    successor = HaStore(root)
    assert successor.jobs.list_ids() == [JOB]
    assert successor.jobs.get(JOB) == stored == replace(PLAN, archive_checksum=stored.archive_checksum)
    assert successor.jobs.read_archive(stored) == b"archive"
    assert successor.jobs.read_archive(PLAN) is None


def test_a_job_is_stored_once(store: HaStore) -> None:
    store.jobs.put(PLAN)
    with pytest.raises(AlreadyExistsError, match=JOB):
        store.jobs.put(replace(PLAN, graph={}))
    assert store.jobs.get(JOB) == PLAN


def test_attempt_that_crashed_before_the_plan_does_not_count_as_a_job(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN, b"archive")
    VersionedDocument(root.child("default", "jobs", JOB, "plan")).delete()
    assert store.jobs.list_ids() == []
    with pytest.raises(NotFoundError, match=JOB):
        store.jobs.get(JOB)
    store.jobs.put(PLAN, b"archive")
    assert store.jobs.list_ids() == [JOB]


@pytest.mark.row("571.5")
def test_overrides_are_kept_inside_the_jobs_configuration(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN)
    assert store.jobs.get(JOB).checkpoint_overrides is None

    def override(job: StoredJob) -> StoredJob:
        return replace(job, configuration={**job.configuration, JOB_CHECKPOINT_OVERRIDES: '{"timeout":1}'})

    store.jobs.update(JOB, override)
    found = HaStore(root).jobs.get(JOB)
    assert found.checkpoint_overrides == '{"timeout":1}'
    assert found.configuration["execution.checkpointing.interval"] == "1 s"


@pytest.mark.row("571.5")
def test_a_change_never_creates_a_job_again(store: HaStore) -> None:
    for _ in range(2):
        with pytest.raises(NotFoundError, match=JOB):
            store.jobs.update(JOB, lambda job: replace(job, version=2))
        store.jobs.put(PLAN)
        store.jobs.remove(JOB)
    assert store.jobs.list_ids() == []


@pytest.mark.row("571.5")
def test_concurrent_changes_are_all_kept(store: HaStore) -> None:
    store.jobs.put(PLAN)

    def add(key: str) -> Callable[[], object]:
        return lambda: store.jobs.update(
            JOB, lambda job: replace(job, configuration={**job.configuration, key: "x"}, version=job.version + 1)
        )

    outcomes = run_together(*(add(f"acme.{number}") for number in range(8)))
    assert all(isinstance(outcome, StoredJob) for outcome in outcomes)
    found = store.jobs.get(JOB)
    assert found.version == 9
    assert {f"acme.{number}" for number in range(8)} < set(found.configuration)


def test_one_of_two_drivers_that_change_a_job_at_once_is_refused(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN)
    zombie = HaStore(root)

    def change_under_its_feet(job: StoredJob) -> StoredJob:
        zombie.jobs.update(JOB, lambda present: replace(present, version=7))
        return replace(job, version=8)

    with pytest.raises(ConflictError, match="changed by another process"):
        store.jobs.update(JOB, change_under_its_feet)
    assert store.jobs.get(JOB).version == 7


def test_rewrite_of_an_unchanged_document_stops_a_delayed_write(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN)

    def settled_meanwhile(job: StoredJob) -> StoredJob:
        assert HaStore(root).jobs.update(JOB, lambda present: present, always=True) == PLAN
        return replace(job, version=8)

    with pytest.raises(ConflictError, match="changed by another process"):
        store.jobs.update(JOB, settled_meanwhile)
    assert store.jobs.get(JOB) == PLAN


def test_a_change_that_raises_or_changes_nothing_writes_nothing(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN)
    revisions = root.child("default", "jobs", JOB, "plan")
    before = list_names(revisions)
    assert store.jobs.update(JOB, lambda job: job) == PLAN
    with pytest.raises(RuntimeError, match=JOB):
        store.jobs.update(JOB, _raise)
    with pytest.raises(ValueError, match="cannot turn job"):
        store.jobs.update(JOB, lambda job: replace(job, job_id=OTHER))
    assert list_names(revisions) == before


def _raise(job: StoredJob) -> StoredJob:
    raise RuntimeError(job.job_id)


@pytest.mark.row("571.7")
def test_a_job_stored_without_the_newer_fields_is_read(store: HaStore, root: Location) -> None:
    plan = VersionedDocument(root.child("default", "jobs", JOB, "plan"))
    plan.write(0, {"job_id": JOB, "graph": {"name": "old"}, "configuration": {}})
    assert store.jobs.get(JOB) == StoredJob(JOB, {"name": "old"})
    store.jobs.update(JOB, lambda job: replace(job, configuration={JOB_CHECKPOINT_OVERRIDES: "{}"}))
    assert store.jobs.get(JOB).checkpoint_overrides == "{}"


@pytest.mark.parametrize(
    "document",
    [{}, {"job_id": "x", "graph": {}, "configuration": {}}, {"job_id": JOB, "graph": {}, "configuration": {"a": 1}}],
)
def test_a_plan_of_another_shape_is_refused_by_name(store: HaStore, root: Location, document: dict[str, Any]) -> None:
    VersionedDocument(root.child("default", "jobs", JOB, "plan")).write(0, document)
    with pytest.raises(CorruptFileError, match=JOB):
        store.jobs.get(JOB)


def test_a_damaged_archive_is_refused_by_name(store: HaStore, root: Location) -> None:
    stored = store.jobs.put(PLAN, b"archive")
    directory = root.child("default", "jobs", JOB)
    (name,) = [name for name in list_names(directory) if name.startswith("archive")]
    replace_file(directory.child(name), b"Archive")
    with pytest.raises(CorruptFileError, match=name):
        store.jobs.read_archive(stored)


@pytest.mark.parametrize("job_id", ["..", "../" + "a" * 29, "A" * 32, ""])
def test_job_ids_cannot_leave_the_directory(store: HaStore, job_id: str) -> None:
    for call in (store.jobs.get, store.jobs.remove, store.pointers, store.counters, store.results.get):
        with pytest.raises(InvalidLocationError):
            call(job_id)


def test_disposal_replaces_a_pointer_until_it_is_settled(store: HaStore) -> None:
    pointers = store.pointers(JOB)
    pointers.add(3, CheckpointPointer("d", True))
    pointers.add(4, CheckpointPointer("e", True))
    pointers.remove(3, {"directory": "d", "files": ["a"]})
    assert list(pointers.list()) == [4]
    assert pointers.disposals() == {3: {"directory": "d", "files": ["a"]}}
    pointers.remove(4)
    pointers.settle(3)
    pointers.settle(3)
    assert (list(pointers.list()), dict(pointers.disposals())) == ([], {})


def test_pointers_are_added_once_listed_in_order_and_removed(store: HaStore, root: Location) -> None:
    pointers = store.pointers(JOB)
    assert pointers.list() == {}
    for checkpoint_id in (10, 9, 11):
        pointers.add(checkpoint_id, CheckpointPointer(f"chk-{checkpoint_id}", True))
    pointers.add(10, CheckpointPointer("chk-10", True))
    with pytest.raises(AlreadyExistsError):
        pointers.add(10, CheckpointPointer("elsewhere", True))
    found = HaStore(root).pointers(JOB).list()
    assert list(found) == [9, 10, 11]
    assert found[10] == CheckpointPointer("chk-10", True)
    for _ in range(2):
        pointers.remove(10)
    assert list(pointers.list()) == [9, 11]


def test_a_damaged_pointer_is_named_and_never_left_out(store: HaStore, root: Location) -> None:
    pointers = store.pointers(JOB)
    pointers.add(1, CheckpointPointer("d", True))
    pointers.add(2, CheckpointPointer("d", True))
    directory = root.child("default", "jobs", JOB, "checkpoints")
    replace_file(directory.child(f"{2:020d}.json"), b"{}")
    with pytest.raises(CorruptFileError, match=f"{2:020d}.json"):
        pointers.list()
    delete_tree(directory)
    VersionedDocument(directory).write(0, {"nine": {}})
    with pytest.raises(CorruptFileError, match="checkpoints"):
        pointers.list()


def test_a_pointer_whose_outcome_is_unknown_is_added_again(store: HaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish_and_fail(location: Location, data: bytes) -> None:
        publish(location, data)
        raise AmbiguousWriteError("no answer", location.url)

    def fail(location: Location, data: bytes) -> None:
        raise AmbiguousWriteError("no answer", location.url)

    pointers = store.pointers(JOB)
    with monkeypatch.context() as patch:
        patch.setattr(versioned_document, "publish", fail)
        with pytest.raises(AmbiguousWriteError):
            pointers.add(1, CheckpointPointer("d", True))
        assert pointers.list() == {}
        patch.setattr(versioned_document, "publish", publish_and_fail)
        pointers.add(1, CheckpointPointer("d", True))
    pointers.add(1, CheckpointPointer("d", True))
    assert pointers.list() == {1: CheckpointPointer("d", True)}


def test_a_failure_after_an_unknown_outcome_leaves_it_unknown(
    store: HaStore, root: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [AmbiguousWriteError("no answer", "x"), StorageError("refused", "x")]

    def fail(file: Location, data: bytes) -> None:
        raise errors.pop(0)

    monkeypatch.setattr(versioned_document, "publish", fail)
    with pytest.raises(AmbiguousWriteError, match="refused"):
        store.pointers(JOB).add(1, CheckpointPointer("x", True))


def test_pointers_and_ids_that_change_at_once_are_all_kept(root: Location) -> None:
    def add(number: int) -> Callable[[], object]:
        def call() -> None:
            HaStore(root).pointers(JOB).add(number, CheckpointPointer("d", True))
            HaStore(root).counters(JOB).reserve_checkpoint(number)

        return call

    assert run_together(*(add(number) for number in range(2, 8))) == [None] * 6
    assert list(HaStore(root).pointers(JOB).list()) == list(range(2, 8))
    assert HaStore(root).counters(JOB).get() == Counters(next_checkpoint_id=8)


def test_the_counters_move_forward_only(store: HaStore, root: Location) -> None:
    counters = store.counters(JOB)
    assert counters.get() == Counters(1, 0)
    counters.reserve_checkpoint(99)
    counters.reserve_checkpoint(5)
    counters.reserve_attempt(3)
    counters.reserve_attempt(2)
    assert counters.get() == Counters(100, 4)
    directory = root.child("default", "jobs", JOB, "counters")
    delete_tree(directory)
    VersionedDocument(directory).write(0, {"next_checkpoint_id": "many"})
    with pytest.raises(CorruptFileError, match="counters"):
        counters.get()


def test_earlier_leader_cannot_change_adopted_documents_although_its_fence_is_late(root: Location) -> None:
    old, new = HaStore(root, epoch=3), HaStore(root, epoch=4)
    old.jobs.put(PLAN)
    old.pointers(JOB).add(1, CheckpointPointer("d", True))
    old.counters(JOB).reserve_checkpoint(1)
    assert new.jobs.adopt(JOB).epoch == 4
    assert list(new.pointers(JOB).adopt()) == [1]
    assert new.counters(JOB).adopt() == Counters(2, 0)
    for change in (
        lambda: old.jobs.update(JOB, lambda job: replace(job, version=2)),
        lambda: old.pointers(JOB).add(2, CheckpointPointer("d", True)),
        lambda: old.pointers(JOB).remove(1),
        lambda: old.counters(JOB).reserve_attempt(3),
    ):
        with pytest.raises(NotLeaderError, match="epoch 4"):
            change()
    new.pointers(JOB).add(2, CheckpointPointer("d", True))
    new.jobs.update(JOB, lambda job: replace(job, version=2))
    assert list(new.pointers(JOB).list()) == [1, 2]


def test_a_pointer_that_was_on_its_way_when_the_leader_changed_is_in_or_out_for_both(root: Location) -> None:
    """Whatever the order of both compare-and-sets: it was added and adopted, or it is refused."""
    for _ in range(10):
        old, new = HaStore(root, epoch=1), HaStore(root, epoch=2)
        outcomes = run_together(
            lambda old=old: old.pointers(JOB).add(1, CheckpointPointer("d", True)), new.pointers(JOB).adopt
        )
        adopted = len(outcomes[1])  # type: ignore[arg-type]
        assert len(new.pointers(JOB).list()) == adopted
        assert isinstance(outcomes[0], (NotLeaderError, AmbiguousWriteError)[: 1 + adopted]) or adopted == 1
        assert not (isinstance(outcomes[0], NotLeaderError) and adopted)
        delete_tree(root)


def test_a_late_writer_cannot_take_an_id_that_was_used_and_cleaned_up(root: Location) -> None:
    document = VersionedDocument(root.child("late"))
    document.write(0, {"next": 1})

    class Pausing(VersionedDocument):
        def _latest(self) -> int:
            found = super()._latest()
            for number in range(1, 4):
                document.write(number, {"next": number + 1})
            return found

    with pytest.raises(AmbiguousWriteError, match="later revision"):
        Pausing(root.child("late")).write(1, {"next": 99})
    present = document.read()
    assert present is not None
    assert (present.number, present.document) == (4, {"next": 4})


def test_a_late_writer_cannot_bring_back_a_removed_document(root: Location) -> None:
    document = VersionedDocument(root.child("late"))
    document.write(0, {})

    class Pausing(VersionedDocument):
        def _latest(self) -> int:
            found = super()._latest()
            document.delete()
            return found

    with pytest.raises(ConflictError):
        Pausing(root.child("late")).write(1, {"zombie": True})
    assert document.read() is None


def test_read_survives_a_revision_that_is_replaced(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    document = VersionedDocument(root.child("moving"))
    document.write(0, {"n": 1})
    moved = False

    def move_once(location: Location, limit: int) -> bytes:
        nonlocal moved
        if not moved:
            moved = True
            VersionedDocument(root.child("moving")).write(1, {"n": 2})
        return read_bytes(location, limit)

    monkeypatch.setattr(versioned_document, "read_bytes", move_once)
    present = document.read()
    assert present is not None
    assert present.document == {"n": 2}


def test_results_outlive_the_job_and_are_dirty_until_it_is_cleaned_up(store: HaStore, root: Location) -> None:
    store.jobs.put(PLAN)
    store.results.create_dirty(JOB, {"status": "FINISHED"})
    with pytest.raises(AlreadyExistsError):
        store.results.create_dirty(JOB, {"status": "FAILED"})
    store.results.create_dirty(OTHER, {"status": "CANCELED"})
    store.jobs.remove(JOB)
    store.results.mark_clean(JOB)
    store.results.mark_clean(JOB)
    successor = HaStore(root).results
    assert successor.list_ids() == [JOB, OTHER]
    assert successor.list_ids(dirty_only=True) == [OTHER]
    assert successor.get(JOB) == {"status": "FINISHED"}
    successor.remove(OTHER)
    assert not successor.has(OTHER)
    with pytest.raises(NotFoundError):
        successor.mark_clean(OTHER)


def test_a_former_leader_can_neither_store_nor_change_an_adopted_result(root: Location) -> None:
    former, successor = HaStore(root, epoch=1).results, HaStore(root, epoch=2).results
    former.create_dirty(OTHER, {"status": "FINISHED"})
    for job_id in (JOB, OTHER):
        successor.adopt(job_id)
    assert successor.list_ids() == [OTHER]
    assert not successor.has(JOB)
    for change in (lambda: former.create_dirty(JOB, {"status": "FAILED"}), lambda: former.mark_clean(OTHER)):
        with pytest.raises(NotLeaderError):
            change()
    with pytest.raises(NotFoundError):
        successor.get(JOB)
    successor.create_dirty(JOB, {"status": "CANCELED"})
    successor.create_dirty(JOB, {"status": "CANCELED"})
    assert successor.list_ids(dirty_only=True) == [JOB, OTHER]


def test_one_of_many_drivers_becomes_the_leader_of_an_epoch(root: Location) -> None:
    stores = [HaStore(root).leader for _ in range(6)]

    def claim(index: int) -> Callable[[], object]:
        return lambda: stores[index].claim(f"http://{index}", f"app-{index}", "1", after=0)

    outcomes = run_together(*(claim(index) for index in range(6)))
    winners = [outcome for outcome in outcomes if isinstance(outcome, LeaderInfo)]
    assert len(winners) == 1
    assert all(isinstance(outcome, LeaderInfo | NotLeaderError) for outcome in outcomes)
    assert stores[0].current() == winners[0]


def test_the_fence_closes_when_another_driver_claims_the_next_epoch(store: HaStore, root: Location) -> None:
    assert store.leader.current() is None
    first = store.leader.claim("http://a", "app-a", "1", after=0)
    fenced = HaStore(root, fence=lambda: store.leader.check(first))
    fenced.jobs.put(PLAN)
    second = store.leader.claim("http://b", "app-b", "1", after=first.epoch)
    assert second.epoch == 2
    for change in (
        lambda: fenced.jobs.put(replace(PLAN, job_id=OTHER)),
        lambda: fenced.jobs.update(JOB, lambda job: replace(job, version=2)),
        lambda: fenced.jobs.remove(JOB),
        lambda: fenced.pointers(JOB).add(1, CheckpointPointer("d", True)),
        lambda: fenced.pointers(JOB).remove(1),
        lambda: fenced.counters(JOB).reserve_checkpoint(9),
        lambda: fenced.results.create_dirty(JOB, {}),
        lambda: store.leader.renew(first, 9),
    ):
        with pytest.raises(NotLeaderError, match="app-b"):
            change()
    assert store.jobs.get(JOB) == PLAN


def test_leases_belong_to_epochs(store: HaStore) -> None:
    first = store.leader.claim("http://a", "app-a", "1", after=0)
    assert store.leader.lease(1).sequence == 0
    store.leader.renew(first, 41)
    assert store.leader.lease(1).sequence == 41
    store.leader.claim("http://b", "app-b", "1", after=1)
    assert store.leader.lease(2).sequence == 0


def test_a_leader_that_ended_in_order_has_released_its_lease(store: HaStore) -> None:
    first = store.leader.claim("http://a", "app-a", "1", after=0)
    store.leader.renew(first, 1)
    assert not store.leader.lease(1).released
    store.leader.release(first)
    assert store.leader.lease(1).released
    second = store.leader.claim("http://b", "app-b", "1", after=1)
    assert not store.leader.lease(second.epoch).released
    with pytest.raises(NotLeaderError):
        store.leader.release(first)


@pytest.mark.row("air.1")
def test_clients_read_the_leaders_address_as_plain_json(store: HaStore, root: Location) -> None:
    info = store.leader.claim("http://a:8081", "app-a", "2", after=0)
    file = root.child("default", "leader.json")
    content = read_bytes(file, 1_000)
    assert content == b'{"rest":"http://a:8081","app_id":"app-a","attempt":"2","epoch":1}\n'
    for damage in (lambda: delete_file(file), lambda: replace_file(file, b"{")):
        damage()
        store.leader.renew(info, 1)
        assert read_bytes(file, 1_000) == content


def test_a_claim_with_an_unknown_outcome_is_settled_by_reading(store: HaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def publish_and_fail(location: Location, data: bytes) -> None:
        publish(location, data)
        raise AmbiguousWriteError("no answer", location.url)

    monkeypatch.setattr(versioned_document, "publish", publish_and_fail)
    assert store.leader.claim("http://a", "app-a", "1", after=0).epoch == 1


def test_a_claim_holds_though_the_address_cannot_be_written(store: HaStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(location: Location, data: bytes) -> None:
        raise StorageError("away", location.url)

    with monkeypatch.context() as patched:
        patched.setattr(leader_store, "replace", fail)
        info = store.leader.claim("http://a", "app-a", "1", after=0)
    assert store.leader.current() == info
    store.leader.renew(info, 1)
    assert b"app-a" in read_bytes(store.root.child("leader.json"), 1_000)


def test_leases_of_former_leaders_are_deleted(store: HaStore) -> None:
    for epoch in range(3):
        store.leader.renew(store.leader.claim("http://a", "app", str(epoch), after=epoch), 1)
    assert [name for name in list_names(store.root) if name.startswith("lease-")] == [f"lease-{3:020d}.json"]


class LooksFirst(MemoryFileSystem):
    """As fsspec does it for every store that has no conditional put."""

    protocol = "looksfirst"
    store: ClassVar[dict[str, Any]] = {}
    pipe_file = AbstractFileSystem.pipe_file


class Overwrites(MemoryFileSystem):
    """A server that does not know conditions."""

    protocol = "overwrites"
    store: ClassVar[dict[str, Any]] = {}

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        super().pipe_file(path, value, mode="overwrite", **kwargs)


@pytest.mark.parametrize("filesystem", [LooksFirst, Overwrites])
def test_a_store_without_exclusive_creation_is_refused(filesystem: type[MemoryFileSystem]) -> None:
    store = HaStore(Location(filesystem(), "/ha", filesystem.protocol))
    with pytest.raises(InvalidLocationError, match="cannot create a file only if it is absent"):
        store.leader.prepare()
    assert not list_names(store.root)


def test_unusable_directories_and_ids_are_refused_and_trials_leave_no_trace(
    store: HaStore, root: Location, tmp_path: Path
) -> None:
    store.leader.prepare()
    assert list_names(store.root) == []
    with pytest.raises(InvalidLocationError):
        HaStore(root, "../other")
    (tmp_path / "file").write_text("x")
    store = HaStore(str(tmp_path / "file"))
    with pytest.raises(StorageError, match=f"file://{tmp_path}/file"):
        store.jobs.put(PLAN)
    with pytest.raises(InvalidLocationError):
        HaStore("relative")


def test_small_documents_are_refused_when_damaged() -> None:
    data = encode_document({"a": [1, "é"]})
    assert decode_document(data, "x") == {"a": [1, "é"]}
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        for content in (bytes(damaged), data[:position]):
            with pytest.raises(CorruptFileError, match="x "):
                decode_document(content, "x")
    with pytest.raises(CorruptFileError):
        decode_document(data + b" ", "x")


def test_a_document_that_is_nested_deeper_than_any_that_was_written_is_damaged() -> None:
    deep = b'{"a":' + b"[" * 300 + b"]" * 300 + b"}"
    with pytest.raises(CorruptFileError, match="damaged"):
        decode_document(b'{"version":1,"checksum":"","document":%s}\n' % deep, "x")
