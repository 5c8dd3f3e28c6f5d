"""Which files of completed checkpoints may be referred to."""

from __future__ import annotations

from ckpt_runtime.checkpoint.completed_checkpoint import StateFile
from ckpt_runtime.state.shared_files import SharedFiles


def file(name: str) -> StateFile:
    return StateFile(f"file:///job/shared/{name}", 1, "c")


A, B = file("a"), file("b")


def taken(files: SharedFiles, number: int, **written: StateFile) -> None:
    files.begun(number)
    files.written(number, written)


def test_only_what_was_notified_is_reusable() -> None:
    files = SharedFiles()
    taken(files, 1, a=A)
    assert files.reusable(2) == {}
    files.completed(1)
    assert files.reusable(2) == {"a": A}


def test_an_aborted_checkpoint_is_no_base() -> None:
    files = SharedFiles()
    taken(files, 1, a=A)
    files.completed(1)
    taken(files, 2, a=A, b=B)
    files.aborted(2)
    assert files.reusable(3) == {"a": A}


def test_files_that_a_pending_older_checkpoint_leaves_out_are_not_reusable() -> None:
    files = SharedFiles()
    taken(files, 1, a=A, b=B)
    files.completed(1)
    files.begun(2)
    assert files.reusable(3) == {}, "it is not known yet"
    files.written(2, {"a": A})
    assert files.reusable(3) == {"a": A}
    assert files.reusable(2) == {"a": A, "b": B}


def test_late_notifications_change_nothing() -> None:
    files = SharedFiles()
    taken(files, 1, a=A)
    taken(files, 2, b=B)
    files.completed(2)
    files.completed(1)
    files.aborted(1)
    files.written(1, {"a": A})
    assert files.reusable(3) == {"b": B}


def test_files_of_unseen_or_restored_checkpoints_are_reusable_if_they_outlive_them() -> None:
    files = SharedFiles()
    taken(files, 1, a=A)
    files.completed(1)
    files.completed(5)
    assert files.reusable(6) == {}
    files = SharedFiles()
    inline = StateFile("", 1, "c", b"x")
    files.restored({"a": A, "own": StateFile("private", 1, "c"), "inline": inline})
    assert files.reusable(1) == {"a": A, "inline": inline}
