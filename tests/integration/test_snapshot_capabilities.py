"""What each kind of snapshot can be used for, cell by cell, on every state backend: docs/snapshots.md has the table.

The golden snapshots prove the cells about releases, tests/differential/test_state_data_source.py those of DataFrames.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.properties import SavepointFormat
from ckpt_runtime.cli.main import main
from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.snapshots.copying import copy_snapshot
from ckpt_runtime.snapshots.keyed_states import keyed_states
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.errors import InvalidLocationError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.effort import cells
from tests.support.golden import IN_FILES, PARALLELISM, SOURCES, UNALIGNED, Kind, Rows, assert_whole, restored, take
from tests.support.jobs import program_of

BACKENDS = {
    "hashmap": {"state.backend.type": "hashmap", "execution.checkpointing.incremental": "true"},
    "rocksdb": {"state.backend.type": "rocksdb", "execution.checkpointing.incremental": "true"},
}
JOB = Kind(IN_FILES, pipeline="capable", arguments=("same",), tables=("kept", "totals"))
KINDS = {
    "canonical": replace(JOB, savepoint=True, savepoint_format=SavepointFormat.CANONICAL),
    "native": replace(JOB, savepoint=True, increment=True),
    "aligned": replace(JOB, increment=True),
    "unaligned": replace(JOB, configuration={**IN_FILES, **UNALIGNED}, rate=0, sleep_ms=10),
}
SAVEPOINTS = ("canonical", "native")

pytestmark = [pytest.mark.row("203.7"), pytest.mark.slow, pytest.mark.timeout(600)]


@dataclass(frozen=True)
class Taken:
    """A snapshot, the rows that it covers, and what restores it."""

    cluster: MiniCluster
    path: Path
    kind: Kind
    before: Rows

    def goes_on(
        self, directory: Path, *, backend: str = "", version: str = "same", at: tuple[int, ...] = (PARALLELISM,)
    ) -> None:
        """Jobs that start from it write exactly what is missing."""
        configuration = {**self.kind.configuration, **(BACKENDS[backend] if backend else {})}
        kind = replace(self.kind, configuration=configuration, arguments=(version,))
        for after in restored(self.cluster, self.path, kind, directory, at):
            assert_whole(kind, self.before, after)


Take = Callable[[str, str], Taken]


@pytest.fixture(scope="module")
def snapshot(cluster: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Take:
    """The snapshot of a kind taken on a backend: one for all tests. Checkpoints stay where they were written."""
    known: dict[tuple[str, str], Taken] = {}

    def taken(name: str, backend: str) -> Taken:
        if (name, backend) not in known:
            kind = KINDS[name]
            kind = replace(kind, configuration={**kind.configuration, **BACKENDS[backend]})
            path, before = take(cluster, kind, tmp_path_factory.mktemp(f"{name}-{backend}"))
            known[name, backend] = Taken(cluster, path, kind, before)
        return known[name, backend]

    return taken


def other(backend: str) -> str:
    (found,) = BACKENDS.keys() - {backend}
    return found


@pytest.mark.row("203.5")
@pytest.mark.parametrize("backend", ["hashmap", pytest.param("rocksdb", marks=pytest.mark.long)])
def test_state_backend_change_from_a_canonical_savepoint(snapshot: Take, backend: str, tmp_path: Path) -> None:
    snapshot("canonical", backend).goes_on(tmp_path, backend=other(backend), at=(PARALLELISM, 3))


@pytest.mark.parametrize(("name", "backend"), cells(["native", "aligned", "unaligned"], [*BACKENDS]))
def test_state_backend_change_from_another_snapshot_is_refused(
    snapshot: Take, name: str, backend: str, tmp_path: Path
) -> None:
    with pytest.raises(SubmissionFailed, match="only a savepoint in canonical form can change the backend"):
        snapshot(name, backend).goes_on(tmp_path, backend=other(backend))
    assert not (tmp_path / str(PARALLELISM) / "out").exists()


@pytest.mark.parametrize(("name", "backend"), cells([*KINDS], [*BACKENDS]))
def test_reading_state(snapshot: Take, name: str, backend: str) -> None:
    opened = open_snapshot(str(snapshot(name, backend).path))
    rows = {
        (state.uid, state.name): sum(batch.num_rows for _, batch in state.rows(state.key_groups))
        for state in keyed_states(opened)
    }
    known = {rows["totals", "aggregates"], rows["kept", "seen"]}
    if name == "unaligned":  # the first row of a key may be in flight
        assert known <= set(range(1, SOURCES + 1))
    else:
        assert known == {SOURCES}
        assert rows["kept", "last"] > SOURCES
    assert any(found.lists for found in opened.states("left")), "positions of the source"


@pytest.mark.row("203.4")
@pytest.mark.parametrize(("name", "backend"), cells(SAVEPOINTS, [*BACKENDS]))
def test_savepoints_are_self_contained_and_relocatable(snapshot: Take, name: str, backend: str, tmp_path: Path) -> None:
    taken = snapshot(name, backend)
    taken.path.rename(tmp_path / "moved")
    try:
        replace(taken, path=tmp_path / "moved").goes_on(tmp_path / "jobs")
    finally:
        (tmp_path / "moved").rename(taken.path)


@pytest.mark.parametrize(
    ("name", "backend"), [("aligned", "rocksdb"), ("unaligned", "hashmap"), ("unaligned", "rocksdb")]
)
def test_checkpoints_that_share_files_are_not_relocated(
    snapshot: Take, name: str, backend: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidLocationError, match="is not self-contained.*take a savepoint"):
        copy_snapshot(str(snapshot(name, backend).path), resolve(tmp_path / "copy"))
    assert not (tmp_path / "copy").exists()


def test_a_copy_of_a_checkpoint_that_shares_files_is_refused_before_anything_starts(
    snapshot: Take, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While the original is there, and when it is gone."""
    taken = snapshot("aligned", "rocksdb")
    cluster, copy = taken.cluster, tmp_path / "copy"
    shutil.copytree(taken.path, copy)
    known = cluster.call(cluster.dispatcher.list_jobs())
    away = taken.path.rename(tmp_path / "away")
    try:
        with pytest.raises(SubmissionFailed, match=f"cannot restore from {copy}: .*copied checkpoint.*savepoint"):
            replace(taken, path=copy).goes_on(tmp_path)
    finally:
        away.rename(taken.path)
    for command in ("run", "plan"):
        asked = [command, "-s", str(copy), "-c", "capable:pipeline", str(program_of("capable")), "same"]
        assert main(["--url", cluster.rest_url, *asked]) != 0
        assert f"written to {taken.path.as_uri()}" in capsys.readouterr().err
    assert cluster.call(cluster.dispatcher.list_jobs()) == known
    assert not (tmp_path / str(PARALLELISM) / "out").exists()


@pytest.mark.parametrize(("name", "backend"), cells([*KINDS], [*BACKENDS]))
def test_schema_evolution(snapshot: Take, name: str, backend: str, tmp_path: Path) -> None:
    snapshot(name, backend).goes_on(tmp_path, version="evolved")


@pytest.mark.parametrize(("name", "backend"), cells(["canonical", "native", "aligned"], [*BACKENDS]))
def test_arbitrary_job_upgrade(snapshot: Take, name: str, backend: str, tmp_path: Path) -> None:
    snapshot(name, backend).goes_on(tmp_path, version="upgraded")


@pytest.mark.parametrize("backend", BACKENDS)
def test_arbitrary_job_upgrade_from_an_unaligned_checkpoint_is_refused(
    snapshot: Take, backend: str, tmp_path: Path
) -> None:
    with pytest.raises(SubmissionFailed, match="savepoint"):
        snapshot("unaligned", backend).goes_on(tmp_path, version="upgraded")
    assert not (tmp_path / str(PARALLELISM) / "out").exists()


@pytest.mark.parametrize(("name", "backend"), cells([*KINDS], [*BACKENDS]))
def test_rescaling(snapshot: Take, name: str, backend: str, tmp_path: Path) -> None:
    snapshot(name, backend).goes_on(tmp_path, at=(1, 3))
