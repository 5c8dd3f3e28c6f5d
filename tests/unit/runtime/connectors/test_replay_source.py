"""Format ``replay``: each row once, per-key order, restore at another parallelism, pacing, and refused restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ckpt_runtime.connectors.replay import ReplaySource
from ckpt_runtime.graph.specs import SourceSpec
from ckpt_runtime.operators.operator import SourceStatus
from tests.support.effort import examples
from tests.unit.runtime.connectors.harness import Clock, context, drain, opened, redistributed, snapshot_of

ROWS = 3000


def table(rows: int = ROWS) -> pa.Table:
    return pa.table(
        {
            "row": pa.array(range(rows), pa.int64()),
            "key": pa.array([None if i % 17 == 0 else f"k{i % 23}" for i in range(rows)], pa.string()),
        }
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("replayed")
    pq.write_table(table().slice(0, 1100), path / "a.parquet", row_group_size=300)
    pq.write_table(table().slice(1100), path / "b.parquet", row_group_size=1000)
    (path / "_ignored.parquet").write_text("hidden")
    return path


def source(path: Path | str, **options: Any) -> ReplaySource:
    given_options = {key: str(value) for key, value in options.items()}
    return ReplaySource(SourceSpec("replay", {"path": str(path), "batchRows": "97", **given_options}))


def test_one_subtask_replays_the_files_in_order(directory: Path) -> None:
    replay = source(directory)
    output = opened(replay, context())
    assert drain(replay)
    assert output.column("row") == list(range(ROWS))
    assert max(batch.num_rows for batch in output.batches) <= 97
    replay.close()


@pytest.mark.parametrize("partition_by", ["", "key,row"])
@settings(max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stages=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 20)), max_size=4), data=st.data())
def test_every_row_comes_exactly_once_through_any_stops_and_rescales(
    directory: Path, partition_by: str, stages: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Subtasks of one stage stop at different places, as they do at a barrier."""
    seen: list[int] = []
    keys: dict[str, list[int]] = {}
    snapshots: list[tuple[Any, ...]] = []
    for number, (parallelism, polls) in enumerate([*stages, (3, None)]):
        restored = redistributed(snapshots, parallelism) if snapshots else [[] for _ in range(parallelism)]
        snapshots = []
        waiting: list[int | None] = []
        for subtask in range(parallelism):
            replay = source(directory, partitionBy=partition_by)
            output = opened(replay, context(subtask, parallelism, state=restored[subtask], restored=number or None))
            drain(replay, None if polls is None else data.draw(st.integers(0, polls)))
            seen += output.column("row")
            for row in output.rows:
                if row["key"] is not None:
                    keys.setdefault(row["key"], []).append(row["row"])
            snapshots.append(snapshot_of(replay, number + 1))
            waiting.append(replay.pending_rows)
            replay.close()
        known = [count for count in waiting if count is not None]
        assert (sum(known), len(known)) == ((0, 0) if partition_by else (ROWS - len(seen), parallelism))
    assert sorted(seen) == list(range(ROWS))
    if partition_by:
        assert all(rows == sorted(rows) for rows in keys.values())


def test_rows_of_one_key_stay_with_one_subtask_and_nulls_are_spread(directory: Path) -> None:
    owners: dict[str | None, set[int]] = {}
    for subtask in range(3):
        replay = source(directory, partitionBy="key,row")
        output = opened(replay, context(subtask, 3))
        drain(replay)
        replay.close()
        for key in output.column("key"):
            owners.setdefault(key, set()).add(subtask)
    assert owners.pop(None) == {0, 1, 2}
    assert all(len(subtasks) == 1 for subtasks in owners.values())


@pytest.mark.parametrize("partition_by", ["", "key"])
def test_the_rate_is_that_of_the_whole_source(directory: Path, partition_by: str) -> None:
    clock = Clock()
    sources = [source(directory, partitionBy=partition_by, rowsPerSecond=200) for _ in range(2)]
    outputs = [opened(replay, context(subtask, 2, monotonic_ms=clock)) for subtask, replay in enumerate(sources)]
    for _ in range(50):
        clock.ms += 100
        for replay in sources:
            while replay.poll() is SourceStatus.MORE_AVAILABLE:
                pass
    total = sum(len(output.rows) for output in outputs)
    assert 995 <= total <= 1000
    for replay in sources:
        replay.close()


def test_a_declared_schema_selects_and_casts(directory: Path) -> None:
    schema = pa.schema([("row", pa.int32())])
    replay = ReplaySource(SourceSpec("replay", {"path": str(directory)}, schema))
    output = opened(replay, context())
    drain(replay)
    replay.close()
    assert output.batches[0].schema == schema
    assert output.column("row") == list(range(ROWS))


def test_replay_source_reads_from_other_file_systems() -> None:
    memory = fsspec.filesystem("memory")
    with memory.open("/replayed/a.parquet", "wb") as stream:
        pq.write_table(table(50), stream)
    replay = ReplaySource(SourceSpec("replay", {"path": "memory://replayed"}, table(1).schema))
    output = opened(replay, context())
    drain(replay)
    replay.close()
    assert output.column("row") == list(range(50))


def test_changed_files_and_partitioning_are_refused_on_restore(tmp_path: Path) -> None:
    pq.write_table(table(100), tmp_path / "a.parquet")
    states = {}
    for partition_by in ("", "key"):
        replay = source(tmp_path, partitionBy=partition_by)
        opened(replay, context())
        drain(replay, 1)
        states[partition_by] = snapshot_of(replay, 1)
        replay.close()
    pq.write_table(table(20), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="contains 120 rows, but the restored positions belong to 100"):
        opened(source(tmp_path), context(state=states[""], restored=1))
    with pytest.raises(
        ValueError, match="option 'partitionBy' is \\['row'\\], but the restored positions belong to \\['key'\\]"
    ):
        opened(source(tmp_path, partitionBy="row"), context(state=states["key"], restored=1))
    grown = source(tmp_path, partitionBy="key")
    output = opened(grown, context(state=states["key"], restored=1))
    drain(grown)
    grown.close()
    assert len(output.rows) == 120 - 97
