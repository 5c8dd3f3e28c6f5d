"""Every file of a savepoint, damaged in every way: verifying names it, and restoring refuses it."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.snapshots.copying import convert_snapshot
from ckpt_runtime.snapshots.inspection import verify_snapshot
from ckpt_runtime.snapshots.snapshot import Problem, Snapshot, open_snapshot
from ckpt_runtime.state.backend import BackendParameters
from ckpt_runtime.storage.errors import CorruptFileError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import encode, read_metadata
from ckpt_runtime.storage.publish import checksum_of
from ckpt_runtime.task.restored_input import StateRestoreError, StateUnavailableError, create_keyed_backend
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
        patch.setattr("ckpt_runtime.snapshots.snapshot.DEFAULT_MEMORY_THRESHOLD", 0)
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
    _forge(savepoint, change)
    return verify_snapshot(open_snapshot(str(savepoint)))


def _forge(savepoint: Path, change: Callable[[dict], None]) -> None:
    document = read_metadata(str(savepoint)).document
    for entry in document["states"]:
        for operator in entry["state"]["operators"].values():
            for handle in operator["keyed"]:
                change(handle)
    (savepoint / "_metadata").write_bytes(encode(document))


def test_rows_that_forged_metadata_puts_into_other_key_groups_are_found(savepoint: Path) -> None:
    def shift(handle: dict) -> None:
        for section in handle["sections"]:
            first, *rest = section["key_group_offsets"]
            section["key_group_offsets"] = [[(first[0] + 1) % 16, *first[1:]], *rest]

    problems = _forged(savepoint, shift)
    assert {problem.state.split(",")[0] for problem in problems} == {
        f"operator {uid!r}" for uid in ("kept", "totals", "joined")
    }
    assert all("belong to other key groups" in problem.reason for problem in problems)


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


# --- databases that the engine has not made


def _named(handle: dict, kind: str) -> list[str]:
    return sorted(name for name in handle["files"] if name.startswith(kind) or name.endswith(kind))


def _content(savepoint: Path, handle: dict, name: str, content: bytes) -> None:
    """A file of other content, which its handle describes."""
    file = handle["files"][name]
    (savepoint / file["path"]).write_bytes(content)
    file |= {"length": len(content), "checksum": checksum_of(content)}


def _garbage(savepoint: Path, handle: dict, kind: str) -> None:
    name = _named(handle, kind)[0]
    _content(savepoint, handle, name, random.Random(1).randbytes(handle["files"][name]["length"]))


def _half(savepoint: Path, handle: dict) -> None:
    name = _named(handle, ".sst")[0]
    content = (savepoint / handle["files"][name]["path"]).read_bytes()
    _content(savepoint, handle, name, content[: len(content) // 2])


def _renamed(handle: dict, kind: str, name: str) -> None:
    handle["files"][name] = handle["files"].pop(_named(handle, kind)[0])


def _absurd(handle: dict) -> None:
    handle["files"][_named(handle, ".sst")[0]]["length"] = (1 << 63) - 1


def _elsewhere(handle: dict, path: str) -> None:
    handle["files"][_named(handle, ".sst")[0]]["path"] = path


HOSTILE: dict[str, Callable[[Path, dict], None]] = {
    "a table of garbage": lambda savepoint, handle: _garbage(savepoint, handle, ".sst"),
    "a manifest of garbage": lambda savepoint, handle: _garbage(savepoint, handle, "MANIFEST"),
    "half a table": _half,
    "an empty table": lambda savepoint, handle: _content(savepoint, handle, _named(handle, ".sst")[0], b""),
    "no manifest": lambda _, handle: handle["files"].pop(_named(handle, "MANIFEST")[0]),
    "a second manifest": lambda _, handle: handle["files"].update(
        {"MANIFEST-999999": handle["files"][_named(handle, "MANIFEST")[0]]}
    ),
    "a table less": lambda _, handle: handle["files"].pop(_named(handle, ".sst")[0]),
    "a table by another number": lambda _, handle: _renamed(handle, ".sst", "999999.sst"),
    "options": lambda _, handle: _renamed(handle, ".sst", "OPTIONS-000007"),
    "a file outside": lambda _, handle: _elsewhere(handle, "../outside"),
    "a file of the system": lambda _, handle: _elsewhere(handle, "/etc/passwd"),
    "an absurd length": lambda _, handle: _absurd(handle),
    "no catalog": lambda _, handle: handle.update(description={}),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_forged_database_is_found_and_never_restored(forms: dict[str, Path], change: str, tmp_path: Path) -> None:
    """Every checksum is right: what is wrong is the database."""
    savepoint = Path(shutil.copytree(forms["rocksdb"], tmp_path / "savepoint"))
    _forge(savepoint, partial(HOSTILE[change], savepoint))
    snapshot = open_snapshot(str(savepoint))
    assert verify_snapshot(snapshot)
    with pytest.raises((StateRestoreError, StateUnavailableError), match="operator 'counts'"):
        _restore(snapshot, "rocksdb", tmp_path)


@pytest.mark.parametrize("kind", [".sst", "MANIFEST"])
def test_files_that_forged_metadata_exchanges_between_databases_are_found(kind: str, tmp_path: Path) -> None:
    savepoint = Path(shutil.copytree(DIRECTORY / "format-2" / "rocksdb", tmp_path / "savepoint"))
    handles: list[dict] = []
    _forge(savepoint, handles.append)
    first, second = (handle["files"][_named(handle, kind)[0]] for handle in handles[:2])
    exchanged = iter((second, first))

    def exchange(handle: dict) -> None:
        file = next(exchanged, None)
        if file is not None:
            handle["files"][_named(handle, kind)[0]] = file

    _forge(savepoint, exchange)
    snapshot = open_snapshot(str(savepoint))
    assert verify_snapshot(snapshot)
    with pytest.raises(StateRestoreError):
        _restore(snapshot, "rocksdb", tmp_path)


@pytest.mark.parametrize("name", ["../outside", "a/b", "/etc/passwd", "..", "", "CURRENT\n", "000001.sst\0", "x" * 256])
def test_names_that_are_no_plain_file_names_are_refused_with_the_metadata(
    forms: dict[str, Path], name: str, tmp_path: Path
) -> None:
    savepoint = Path(shutil.copytree(forms["rocksdb"], tmp_path / "savepoint"))
    _forge(savepoint, lambda handle: _renamed(handle, ".sst", name))
    with pytest.raises(CorruptFileError, match="_metadata"):
        open_snapshot(str(savepoint))


@pytest.mark.parametrize("version", [0, 2, -1, 1 << 62, "1", None])
@pytest.mark.parametrize("form", FORMS)
def test_handles_of_unknown_versions_are_refused_with_the_metadata(
    forms: dict[str, Path], form: str, version: object, tmp_path: Path
) -> None:
    savepoint = Path(shutil.copytree(forms[form], tmp_path / "savepoint"))
    _forge(savepoint, lambda handle: handle.update(version=version))
    with pytest.raises(CorruptFileError, match="_metadata"):
        open_snapshot(str(savepoint))
