"""What the driver removes of a sink's hidden files when the job has ended, and which id it gives a sink."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.checkpoint.completed_checkpoint import (
    CompletedCheckpoint,
    OperatorListState,
    OperatorStateMode,
    OperatorSubtaskState,
    SubtaskState,
    VertexDescriptor,
)
from ckpt_runtime.checkpoint.properties import CheckpointProperties
from ckpt_runtime.checkpoint.sink_state import MESSAGES, PENDING, SINK_ID, SinkLineage, new_sink_id, pending_names
from ckpt_runtime.connectors.part_directory import PartName, owner_of
from ckpt_runtime.graph.job_graph import JobGraph, JobVertex, OperatorNode
from ckpt_runtime.snapshots.clean_up import clean_up_sinks, sink_lineages, sink_outputs
from ckpt_runtime.storage.checkpoint_storage import CheckpointStorage
from ckpt_runtime.storage.errors import StorageError
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.metadata import write_metadata

JOB, FORMER = "a" * 32, "b" * 32
SINK = "0123456789abcdef"


def graph(out: Path) -> JobGraph:
    node = OperatorNode("out", "Out", "sink", stateful=True, output_directory=str(out))
    return JobGraph("job", (JobVertex("v" * 32, (node,), 1),), ())


def snapshot(number: int, directory: Path, *names: str, sink: str = SINK) -> CompletedCheckpoint:
    lists = (
        OperatorListState(PENDING, OperatorStateMode.SPLIT, tuple({"directory": "", "name": name} for name in names)),
        OperatorListState(SINK_ID, OperatorStateMode.SPLIT, (sink,)),
    )
    state = SubtaskState({"out": OperatorSubtaskState(lists=lists)})
    return CompletedCheckpoint(
        number, FORMER, 0, 0, str(directory), CheckpointProperties(),
        (VertexDescriptor("v" * 32, "Out", ("out",), 1, 128),), states={("v" * 32, 0): state},
    )  # fmt: skip


def hide(out: Path, job_id: str, sequence: int, checkpoint: int | None = None, sink: str = SINK) -> str:
    part = PartName(owner_of(job_id, "out", sink), 0, 0, sequence, "0" * 8, checkpoint)
    (out / part.hidden).touch()
    return part.hidden


def test_a_sink_keeps_the_id_of_its_snapshot_and_gets_one_without(tmp_path: Path) -> None:
    taken = snapshot(7, tmp_path)
    assert sink_lineages(graph(tmp_path), "seed", taken, (FORMER,), 3) == {
        "out": SinkLineage(SINK, (FORMER,), 3, continues=True)
    }
    fresh = {"out": SinkLineage(new_sink_id("seed", "out"))}
    assert sink_lineages(graph(tmp_path), "seed", None, (FORMER,)) == fresh
    forged = snapshot(7, tmp_path, sink="../../x")
    assert sink_lineages(graph(tmp_path), "seed", forged, (FORMER,)) == fresh


def test_a_sink_that_starts_fresh_keeps_the_id_of_its_own_job_alone(tmp_path: Path) -> None:
    taken, whole = snapshot(7, tmp_path), graph(tmp_path)
    [vertex] = whole.vertices
    changed = replace(whole, vertices=(replace(vertex, operators=(replace(vertex.operators[0], starts_fresh=True),)),))
    fresh = {"out": SinkLineage(new_sink_id("seed", "out"))}
    assert sink_lineages(changed, "seed", taken, (FORMER,), job_id=JOB) == fresh
    assert sink_lineages(changed, "seed", taken, job_id=FORMER) == {"out": SinkLineage(SINK, continues=True)}


def test_files_that_wait_for_a_single_committer_or_for_each_subtask_are_known_from_a_snapshot(tmp_path: Path) -> None:
    """By all forms that versions have written; the message of a PySpark writer names no file, whatever it holds."""
    message = '{"directory":"","name":"single"}'
    items = (
        {"version": 2, "checkpoint": 7, "writer": "w", "messages": [[0, message], [1, None], [1, "{"], [0, "[1]"]]},
    )
    nested = {"checkpoint": 7, "writer": "w", "committable": {"directory": "", "name": "each"}}
    together = {"checkpoint": 7, "writer": "w", "committables": [{"name": "one"}, {"name": "other"}, {"rows": 3}]}
    lists = (
        OperatorListState(MESSAGES, OperatorStateMode.SPLIT, items),
        OperatorListState(PENDING, OperatorStateMode.SPLIT, (nested, {"directory": "", "name": "old"}, together)),
    )
    taken = replace(
        snapshot(7, tmp_path), states={("v" * 32, 0): SubtaskState({"out": OperatorSubtaskState(lists=lists)})}
    )
    assert pending_names([taken]) == {"single", "each", "old", "one", "other"}


def test_only_output_that_no_snapshot_covers_is_removed(tmp_path: Path) -> None:
    out, storage = tmp_path / "out", CheckpointStorage(str(tmp_path / "checkpoints"), JOB)
    out.mkdir()
    gone = {hide(out, JOB, 0), hide(out, JOB, 1, checkpoint=9), hide(out, JOB, 2, checkpoint=6)}
    retained, savepoint = hide(out, JOB, 3, checkpoint=8), hide(out, JOB, 4, checkpoint=5)
    others = {hide(out, FORMER, 5), hide(out, JOB, 6, sink="f" * 16)}
    directory = Path(storage.checkpoint(8).path)
    directory.mkdir(parents=True)
    write_metadata(resolve(str(directory)), snapshot(8, directory, retained).to_json())
    Path(storage.checkpoint(9).path).mkdir()
    lineages = {"out": SinkLineage(SINK)}
    for _ in range(2):
        clean_up_sinks(sink_outputs(JOB, graph(out), lineages), storage, savepoint_id=5)
        assert {file.name for file in out.iterdir()} == {retained, savepoint, *others}
    assert gone


def test_an_unreadable_checkpoint_keeps_what_it_may_cover(tmp_path: Path) -> None:
    """What is in progress goes all the same, if it comes first."""
    out, storage = tmp_path / "out", CheckpointStorage(str(tmp_path / "checkpoints"), JOB)
    out.mkdir()
    pending = hide(out, JOB, 0, checkpoint=8)
    directory = Path(storage.checkpoint(8).path)
    directory.mkdir(parents=True)
    (directory / "_metadata").write_bytes(b"damaged")
    with pytest.raises(StorageError):
        clean_up_sinks(sink_outputs(JOB, graph(out), {"out": SinkLineage(SINK)}), storage, savepoint_id=0)
    assert [file.name for file in out.iterdir()] == [pending]


def test_directory_that_was_never_created_is_not_an_error(tmp_path: Path) -> None:
    storage = CheckpointStorage(str(tmp_path / "checkpoints"), JOB)
    clean_up_sinks(sink_outputs(JOB, graph(tmp_path / "out"), {"out": SinkLineage(SINK)}), storage, savepoint_id=0)
    assert not (tmp_path / "out").exists()
