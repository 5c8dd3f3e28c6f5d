"""Disposal of what a job has claimed whose end is certain, with real files: what goes, what stays, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    IncrementalKeyedStateHandle,
    OperatorSubtaskState,
    StateFile,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties, CheckpointType, SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.processes.process_mark import RELEASED, own_mark
from ckpt_runtime.snapshots.catalogue import described, list_savepoints
from ckpt_runtime.snapshots.job_claims import claim_snapshot, dispose_of_snapshot
from ckpt_runtime.snapshots.snapshot import disposal_of, open_snapshot
from ckpt_runtime.storage import checkpoint_storage
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.claims import Claim, Claimant, ClaimedError, acquire, read_claim
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import Location, delete_file, list_names, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.savepoint_entry import change_entry, delete_entry
from tests.support.snapshots import write_file, write_snapshot

OWNER, OTHER = "1" * 32, "2" * 32
CLUSTER = "session b"


def write_savepoint(directory: Location, *files: StateFile) -> CompletedCheckpoint:
    """Of a backend whose increments may still refer to its two files, ``a`` and ``b``."""
    own = {name: write_file(directory) for name in "ab"}
    handle = IncrementalKeyedStateHandle(KeyGroupRange(0, 127), "files", own, {})
    state = SubtaskState({"u": OperatorSubtaskState((handle,))}, 10)
    metadata = CompletedCheckpoint(
        1, OWNER, 1, 2, directory.url, CheckpointProperties(CheckpointType.SAVEPOINT, SavepointFormat.NATIVE),
        (VertexDescriptor("v", "v", ("u",), 1, 128),), {("v", 0): state},
    )  # fmt: skip
    write_metadata(directory, metadata.to_json())
    change_entry(directory, lambda entry: entry, lambda: described(metadata))
    return metadata


def shared_files(metadata: CompletedCheckpoint) -> list[StateFile]:
    return [file for state in metadata.claimed().states.values() for file in state.files()]


def retained(root: Path, job: str, *files: StateFile) -> CompletedCheckpoint:
    storage = CheckpointStorage(str(root), job)
    storage.initialize()
    directory = storage.initialize_checkpoint(1)
    return replace(write_snapshot(directory, *files), directory=directory.url)


def claimed_by(root: Path, metadata: CompletedCheckpoint, process: str | None, job: str = OWNER) -> None:
    owner = Claimant(job, "session a", CheckpointStorage(str(root), job).location.url, process)
    claim_snapshot(metadata, owner)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def savepoint(root: Path) -> CompletedCheckpoint:
    directory = root / "savepoints" / "savepoint-1"
    directory.mkdir(parents=True)
    return write_savepoint(resolve(str(directory)))


@pytest.mark.row("203.12")
@pytest.mark.parametrize("process", [None, own_mark(), "another-boot/pid:[1]/7/7"], ids=["unknown", "own", "other"])
def test_snapshot_is_not_disposed_of_while_its_owner_may_live(
    root: Path, savepoint: CompletedCheckpoint, process: str | None
) -> None:
    claimed_by(root, savepoint, process)
    directory = resolve(savepoint.directory)
    before = list_names(directory)
    with pytest.raises(ClaimedError, match=f"claimed by job {OWNER} of session a"):
        dispose_of_snapshot(savepoint.directory, CLUSTER)
    assert list_names(directory) == before
    assert open_snapshot(directory).verify() == []


@pytest.mark.row("203.12")
@pytest.mark.parametrize("process", [None, own_mark()])
def test_ended_job_of_this_cluster_releases_its_claim(
    root: Path, savepoint: CompletedCheckpoint, process: str | None
) -> None:
    """But for what its retained checkpoint needs. A job of the same id of another cluster is another one."""
    claimed_by(root, savepoint, process)
    needed, _ = shared_files(savepoint)
    checkpoint = retained(root, OWNER, needed)
    for cluster, ended in ((CLUSTER, {OWNER}), ("session a", {OTHER})):
        with pytest.raises(ClaimedError):
            dispose_of_snapshot(savepoint.directory, cluster, ended=ended)
    for _ in range(2):
        dispose_of_snapshot(savepoint.directory, "session a", ended={OWNER})
        assert open_snapshot(checkpoint.directory).verify() == []
        assert set(list_names(resolve(savepoint.directory))) == {"claim", resolve(needed.path).name}
    dispose_of_snapshot(checkpoint.directory, "session a")
    dispose_of_snapshot(savepoint.directory, "session a", ended={OWNER})
    assert list((root / "savepoints").iterdir()) == []


@pytest.mark.row("203.12")
@pytest.mark.parametrize("subsumed", [False, True])
def test_directory_left_by_a_dead_owner_is_deleted_as_a_whole(
    root: Path, savepoint: CompletedCheckpoint, subsumed: bool
) -> None:
    claimed_by(root, savepoint, RELEASED)
    if subsumed:  # by the owner, which got no further
        disposal_of(savepoint.directory, claimed=True).execute()
        assert len(list_names(resolve(savepoint.directory))) == 3, "the claim, and two files that it names"
    dispose_of_snapshot(f"{savepoint.directory}/_metadata", CLUSTER)
    assert list((root / "savepoints").iterdir()) == []


@pytest.mark.row("203.12")
def test_files_that_a_checkpoint_of_the_dead_owner_needs_stay_and_are_claimed_by_it(
    root: Path, savepoint: CompletedCheckpoint
) -> None:
    claimed_by(root, savepoint, RELEASED)
    needed, other = shared_files(savepoint)
    checkpoint = retained(root, OWNER, needed)
    dispose_of_snapshot(savepoint.directory, CLUSTER)
    assert Path(resolve(needed.path).path).exists()
    assert not Path(resolve(other.path).path).exists()
    assert open_snapshot(checkpoint.directory).verify() == []
    claim = read_claim(resolve(savepoint.directory))
    assert claim is not None
    assert (claim.owner.job_id, claim.owner.process) == (OWNER, RELEASED)
    heir = Claimant(OTHER, CLUSTER, CheckpointStorage(str(root), OTHER).location.url)
    assert len(claim_snapshot(open_snapshot(checkpoint.directory).metadata, heir).places) == 2


@pytest.mark.row("203.12")
def test_files_left_for_a_checkpoint_are_deleted_after_that_checkpoint(
    root: Path, savepoint: CompletedCheckpoint
) -> None:
    claimed_by(root, savepoint, RELEASED)
    needed, _ = shared_files(savepoint)
    checkpoint = retained(root, OWNER, needed)
    for _ in range(2):  # again changes nothing
        dispose_of_snapshot(savepoint.directory, CLUSTER)
        assert set(list_names(resolve(savepoint.directory))) == {"claim", resolve(needed.path).name}
    dispose_of_snapshot(checkpoint.directory, CLUSTER)
    dispose_of_snapshot(savepoint.directory, CLUSTER)
    assert list((root / "savepoints").iterdir()) == []


@pytest.mark.row("203.12")
def test_siblings_of_a_checkpoint_stay_whole_and_can_be_claimed_again(root: Path) -> None:
    storage = CheckpointStorage(str(root), OWNER)
    storage.initialize()
    both, own = (_shared(storage, number) for number in (1, 2))
    sibling = write_snapshot(storage.initialize_checkpoint(1), both)
    claimed = replace(write_snapshot(storage.initialize_checkpoint(2), both, own), directory=storage.checkpoint(2).url)
    claimed_by(root, claimed, RELEASED, OTHER)
    with pytest.raises(StorageError, match="an active job writes to"):
        dispose_of_snapshot(claimed.directory, CLUSTER, (storage.location.url,))
    dispose_of_snapshot(claimed.directory, CLUSTER)
    assert storage.list_checkpoints() == [1]
    assert open_snapshot(sibling.directory).verify() == []
    assert list_names(storage.shared) == [resolve(both.path).name]
    assert read_claim(storage.location) is None


def _shared(storage: CheckpointStorage, number: int) -> StateFile:
    file = write_file(storage.shared)
    name = f"chk-{number}-{file.path}"
    Path(storage.shared.child(file.path).path).rename(storage.shared.child(name).path)
    return StateFile(storage.shared.child(name).url, file.length, file.checksum)


@pytest.mark.row("203.12")
@pytest.mark.parametrize("dies_at", ["metadata", "first file", "second file", "entry"])
def test_a_disposal_that_is_interrupted_at_any_step_continues(
    root: Path, savepoint: CompletedCheckpoint, monkeypatch: pytest.MonkeyPatch, dies_at: str
) -> None:
    claimed_by(root, savepoint, RELEASED)
    left_to_do = {"metadata": 0, "first file": 1, "second file": 2, "entry": 3}[dies_at]

    def counting(delete: Callable[[Location], None]) -> Callable[[Location], None]:
        def call(location: Location) -> None:
            nonlocal left_to_do
            if left_to_do == 0:
                raise StorageError("storage is away", location.url)
            left_to_do -= 1
            delete(location)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_storage, "delete_file", counting(delete_file))
        patch.setattr(checkpoint_storage, "delete_entry", counting(delete_entry))
        with pytest.raises(StorageError, match="storage is away"):
            dispose_of_snapshot(savepoint.directory, CLUSTER)
    assert left_to_do == 0
    (left,) = list_savepoints(str(root))
    assert "deletion is in progress or was interrupted" in (left.problem or "")
    dispose_of_snapshot(savepoint.directory, "session c")
    assert list((root / "savepoints").iterdir()) == []


@pytest.mark.row("203.12")
def test_a_claim_of_another_snapshot_in_the_same_directory_does_not_block(
    root: Path, savepoint: CompletedCheckpoint
) -> None:
    checkpoint = retained(root, OWNER)
    acquire(
        resolve(checkpoint.directory).parent,
        Claim(Claimant(OTHER, "session a", str(root)), resolve(checkpoint.directory).parent.child("chk-7").url),
    )
    dispose_of_snapshot(checkpoint.directory, CLUSTER)
    dispose_of_snapshot(savepoint.directory, CLUSTER)
    assert list((root / "savepoints").iterdir()) == []
    assert read_claim(resolve(checkpoint.directory).parent) is not None
