"""Every file of a savepoint, damaged in every way: verifying names it, and restoring refuses it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.convert import convert_snapshot
from ckpt_runtime.snapshots.snapshot import Problem, Snapshot, open_snapshot
from ckpt_runtime.snapshots.verification import verify_snapshot
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.task.restore import StateRestoreError, StateUnavailableError, create_keyed_backend
from tests.support.golden import DIRECTORY
from tests.support.snapshots import write_keyed_state

pytestmark = pytest.mark.row("203.10")

SAVEPOINT = DIRECTORY / "format-2" / "savepoint"
FORMS = {"pages": "hashmap", "canonical": "hashmap", "rocksdb": "rocksdb"}
"""Forms of snapshots, and the backend that restores each."""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("forms")
    convert_snapshot(str(SAVEPOINT), resolve(directory / "canonical"), SavepointFormat.CANONICAL, "hashmap")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ckpt_runtime.snapshots.new_files.DEFAULT_MEMORY_THRESHOLD", 0)
        write_keyed_state("rocksdb", resolve(directory / "rocksdb"), [KeyGroupRange(0, 127)])
    return {"pages": SAVEPOINT, "canonical": directory / "canonical", "rocksdb": directory / "rocksdb"}


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SAVEPOINT, tmp_path / "savepoint"))


def _flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def _swap(file: Path) -> None:
    """With another one, of other content."""
    other = next(path for path in _state_files(file.parent) if path.read_bytes() != file.read_bytes())
    aside = file.rename(file.with_name("aside"))
    other.rename(file)
    aside.rename(other)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "truncated": lambda file: os.truncate(file, file.stat().st_size - 1),
    "flipped": _flip,
    "swapped": _swap,
}


def _state_files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.name != "_metadata" and path.stat().st_size > 0)


def _restore(snapshot: Snapshot, backend: str, scratch: Path) -> None:
    """As a job with one subtask does it."""
    for vertex in snapshot.metadata.vertices:
        everything = KeyGroupRange(0, vertex.max_parallelism - 1)
        for uid in vertex.operator_uids:
            handles = [handle for state in snapshot.states(uid) for handle in state.keyed]
            make_directory = partial(tempfile.mkdtemp, dir=scratch)
            parameters = BackendParameters(uid, everything, vertex.max_parallelism, make_directory)
            create_keyed_backend(backend, parameters, handles, snapshot.directory.url, owned=False).close()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("form", FORMS)
def test_any_damaged_file_is_named_and_never_restored(
    forms: dict[str, Path], form: str, damage: str, tmp_path: Path
) -> None:
    names = [file.name for file in _state_files(forms[form])]
    assert len(names) > 1
    for number, name in enumerate(names):
        savepoint = Path(shutil.copytree(forms[form], tmp_path / str(number)))
        DAMAGES[damage](savepoint / name)
        snapshot = open_snapshot(str(savepoint))
        problems = verify_snapshot(snapshot)
        assert any(name in problem.reason for problem in problems)
        assert len(problems) == (2 if damage == "swapped" else 1)
        refusal = StateUnavailableError if damage == "deleted" else StateRestoreError
        with pytest.raises(refusal) as caught:
            _restore(snapshot, FORMS[form], tmp_path)
        assert damage == "swapped" or name in str(caught.value)


@pytest.mark.parametrize("form", FORMS)
def test_an_undamaged_one_is_restored(forms: dict[str, Path], form: str, tmp_path: Path) -> None:
    snapshot = open_snapshot(str(forms[form]))
    assert verify_snapshot(snapshot) == []
    _restore(snapshot, FORMS[form], tmp_path)


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_metadata_is_named(savepoint: Path, damage: str) -> None:
    DAMAGES[damage](savepoint / "_metadata")
    with pytest.raises(CorruptFileError, match="_metadata"):
        open_snapshot(str(savepoint))


def test_every_flipped_bit_of_the_metadata_is_found(savepoint: Path) -> None:
    content = (savepoint / "_metadata").read_bytes()
    for position in range(0, len(content), 7):
        changed = bytearray(content)
        changed[position] ^= 1 << position % 8
        (savepoint / "_metadata").write_bytes(changed)
        with pytest.raises(CorruptFileError, match="_metadata"):
            open_snapshot(str(savepoint))


def _forged(savepoint: Path, change: Callable[[dict], None]) -> list[Problem]:
    """What verifying says when the document was changed, and stored with valid checksums."""
    from ckpt_runtime.storage.metadata import encode
    from ckpt_runtime.storage.snapshot_metadata import read_metadata

    document = read_metadata(str(savepoint)).document
    for entry in document["states"]:
        for operator in entry["state"]["operators"].values():
            for handle in operator["keyed"]:
                change(handle)
    (savepoint / "_metadata").write_bytes(encode(document))
    return verify_snapshot(open_snapshot(str(savepoint)))


def test_rows_that_forged_metadata_puts_into_other_key_groups_are_found(savepoint: Path) -> None:
    def shift(handle: dict) -> None:
        for section in handle["sections"]:
            first, *rest = section["key_group_offsets"]
            section["key_group_offsets"] = [[(first[0] + 1) % 16, *first[1:]], *rest]

    problems = _forged(savepoint, shift)
    assert {problem.state.split(",")[0] for problem in problems} == {
        f"operator {uid!r}" for uid in ("kept", "totals", "joined")
    }
    assert all("belong to others" in problem.reason for problem in problems)


def test_a_descriptor_that_does_not_fit_the_rows_is_found(savepoint: Path) -> None:
    def exchange(handle: dict) -> None:
        sections = handle["sections"]
        descriptors = [section["descriptor"] for section in sections]
        for section, descriptor in zip(sections, descriptors[1:] + descriptors[:1], strict=True):
            section["descriptor"] = descriptor

    problems = _forged(savepoint, exchange)
    assert any("cannot be read" in problem.reason for problem in problems)


@pytest.mark.parametrize(
    "descriptor", [{}, {"format": 9}, {"format": 1, "kind": "pickle"}, {"format": 1, "kind": "map"}]
)
def test_unknown_descriptors_are_found(savepoint: Path, descriptor: dict) -> None:
    def change(handle: dict) -> None:
        for section in handle["sections"]:
            section["descriptor"] = descriptor

    assert len(_forged(savepoint, change)) == 3
