"""Positions of sources that a user sets in a savepoint: what is written, and what is refused."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    ChannelStateSegment,
    ChannelStateStream,
    CompletedCheckpoint,
    OperatorSubtaskState,
)
from ckpt_runtime.snapshots.catalogue import SavepointFacts, latest_good, record_savepoint
from ckpt_runtime.snapshots.copying import default_target, reposition_snapshot
from ckpt_runtime.snapshots.inspection import summarized
from ckpt_runtime.snapshots.positions import repositioned, start_position
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.sources import StartPosition
from ckpt_runtime.storage.errors import AlreadyExistsError, InvalidLocationError
from ckpt_runtime.storage.filesystem import Location, list_names, make_directory, resolve
from ckpt_runtime.storage.metadata import write_metadata
from ckpt_runtime.storage.savepoint_entry import read_entry
from tests.support.snapshots import UID, keyed, write_file
from tests.unit.runtime.connectors.split_jobs import Job, metadata_of

NOW = 1_800_000_000_000
EARLIEST = StartPosition("earliest")
LINES = pa.schema([("value", pa.string())])


@pytest.fixture
def savepoint(base: Location, tmp_path: Path) -> CompletedCheckpoint:
    """A savepoint of a source and of an operator behind it, whose state is a file."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("one\ntwo\n")
    directory = base.child("savepoints", "savepoint-1")
    make_directory(directory)
    with closing(Job("text", {"path": str(tmp_path / "in")}, LINES, most_rows=1)) as job:
        job.discover()
        job.read()
        metadata = metadata_of(job.checkpoint(1), directory.url)
    state = metadata.states["readers", 0]
    behind = replace(
        state,
        operators={
            **state.operators,
            "behind": OperatorSubtaskState(keyed(write_file(directory)).operators[UID].keyed),
        },
    )
    metadata = replace(metadata, states={**metadata.states, ("readers", 0): behind})
    write_metadata(directory, metadata.to_json())
    return metadata


@pytest.mark.parametrize(
    ("text", "position"),
    [
        ("earliest", EARLIEST),
        (" Latest ", StartPosition("latest")),
        ("2026-11-01T09:00", StartPosition("timestamp", 1_793_523_600_000)),
        ("2026-11-01T09:00:00.250+02:00", StartPosition("timestamp", 1_793_516_400_250)),
        ('{"orders": {"0": 23}}', StartPosition("offsets", offsets={"orders": {"0": 23}})),
    ],
)
def test_a_position_is_read_from_text(text: str, position: StartPosition) -> None:
    assert start_position(text, NOW) == position


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("yesterday", "'yesterday' is not a position; allowed are earliest, latest, a time"),
        ("2099-01-01", "must be a time between 1970 and now"),
        ("1969-12-31", "must be a time between 1970 and now"),
        ('{"orders"', "the offsets are not JSON"),
        ('{"a":' * 50_000, "offsets"),
        ("", "is not a position"),
    ],
)
def test_text_that_is_not_a_position_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        start_position(text, NOW)


@pytest.mark.row("ends.7")
def test_new_savepoint_has_all_other_state_and_is_self_contained(
    savepoint: CompletedCheckpoint, base: Location
) -> None:
    source, target = resolve(savepoint.directory), base.child("new", "place")
    made = reposition_snapshot(source, target, {"orders": EARLIEST})
    assert made.location == target.url
    opened = open_snapshot(target)
    assert summarized(opened).self_contained
    assert summarized(opened).repositioned == {"orders": "earliest"}
    assert opened.verify() == []
    before, after = savepoint.states["readers", 0], opened.metadata.states["readers", 0]
    assert after.operators["behind"] == before.operators["behind"]
    assert after.operators["orders.reader"].lists == ()
    assert before.operators["orders.reader"].lists[0].items != ()
    assert open_snapshot(source).metadata.states == savepoint.states


@pytest.mark.row("ends.7")
def test_the_same_call_again_returns_the_same_savepoint_and_another_one_is_refused(
    savepoint: CompletedCheckpoint, base: Location
) -> None:
    source, target = resolve(savepoint.directory), base.child("new")
    first = reposition_snapshot(source, target, {"orders": EARLIEST})
    names = set(list_names(target))
    assert reposition_snapshot(source, target, {"orders": EARLIEST}) == first
    with pytest.raises(AlreadyExistsError):
        reposition_snapshot(source, target, {"orders": StartPosition("latest")})
    assert set(list_names(target)) == names
    assert default_target(source) != default_target(source)


@pytest.mark.row("ends.7")
def test_a_position_is_refused_with_the_reason(savepoint: CompletedCheckpoint, base: Location) -> None:
    with pytest.raises(InvalidLocationError, match="no source 'payments' .* sources of that kind in it: 'orders'"):
        repositioned(savepoint, {"payments": EARLIEST})
    with pytest.raises(InvalidLocationError, match="no source 'behind'"):
        repositioned(savepoint, {"behind": EARLIEST})
    once = repositioned(savepoint, {"orders": EARLIEST})
    with pytest.raises(InvalidLocationError, match="was already set in .*"):
        repositioned(once, {"orders": EARLIEST})
    with pytest.raises(InvalidLocationError, match="take a new savepoint"):
        repositioned(replace(savepoint, edges=()), {"orders": EARLIEST})
    state = savepoint.states["readers", 0]
    stream = ChannelStateStream(0, 0, "", (ChannelStateSegment(write_file(base), 0, 5),))
    in_flight = {**savepoint.states, ("readers", 0): replace(state, inputs=(stream,))}
    with pytest.raises(InvalidLocationError, match="contains in-flight data"):
        repositioned(replace(savepoint, states=in_flight), {"orders": EARLIEST})
    with pytest.raises(InvalidLocationError):
        reposition_snapshot(savepoint.directory, base.child("none"), {"payments": EARLIEST})
    assert "none" not in list_names(base)


@pytest.mark.row("ends.7")
def test_savepoint_whose_position_was_set_is_never_the_latest_good_one(
    savepoint: CompletedCheckpoint, base: Location
) -> None:
    record_savepoint(savepoint.directory, SavepointFacts("totals", "p", 1, "c"))
    directory = base.child("savepoints")
    with_entry, without = directory.child("with"), directory.child("without")
    reposition_snapshot(savepoint.directory, with_entry, {"orders": EARLIEST})
    reposition_snapshot(savepoint.directory, without, {"orders": EARLIEST})
    entry = read_entry(with_entry)
    assert entry is not None
    assert (entry.job_name, entry.repositioned) == ("totals", {"orders": "earliest"})
    found = latest_good(directory)
    assert found is not None
    assert found.location == savepoint.directory


@pytest.mark.row("ends.7")
def test_the_latest_good_savepoint_before_a_time_had_completed_by_then(
    savepoint: CompletedCheckpoint, base: Location
) -> None:
    for hour in (1, 2, 3):
        directory = base.child("savepoints", f"at-{hour}")
        make_directory(directory)
        source = replace(savepoint, directory=directory.url, completion_timestamp=hour * 1000, states={})
        write_metadata(directory, source.to_json())

    def newest(before_ms: int) -> str | None:
        found = latest_good(base.child("savepoints"), before_ms=before_ms)
        return None if found is None else resolve(found.location).name

    assert [newest(before_ms) for before_ms in (2, 3, 1000, 1001, 3000, 3001)] == [
        None,
        "savepoint-1",
        "savepoint-1",
        "at-1",
        "at-2",
        "at-3",
    ]
