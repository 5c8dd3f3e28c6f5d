"""``ckpt snapshot list``, ``latest`` and ``verify``: the savepoint catalogue, read from storage without a session.

``ckpt leftovers`` finds the hidden files that sinks left behind when their jobs and the driver were killed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.output import duration_text, size_text, time_text, user_name
from ckpt_runtime.cli.snapshot_tools import SnapshotArgument, opened_snapshot, shown_name, storage_failures
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from ckpt_runtime.connectors.part_directory import HiddenFile
    from ckpt_runtime.snapshots.catalogue import CataloguedSavepoint
    from ckpt_runtime.snapshots.inspection import SnapshotSummary
    from ckpt_runtime.storage.filesystem import Location
    from ckpt_runtime.storage.savepoint_entry import Mark

DirectoryArgument = Annotated[
    str, typer.Argument(metavar="DIRECTORY", help="Directory to search: absolute path or URL.")
]


def list_snapshots(cli: Cli, directory: DirectoryArgument) -> None:
    """List the checkpoints and savepoints below a directory, the latest first, with what the catalogue says."""
    with storage_failures():
        from ckpt_runtime.snapshots.catalogue import check_listable, find_places, look_at
        from ckpt_runtime.snapshots.inspection import summarized
        from ckpt_runtime.storage.errors import CorruptFileError, NotFoundError
        from ckpt_runtime.storage.filesystem import resolve

        base = resolve(directory)
        check_listable(base)
        readable: list[tuple[SnapshotSummary, CataloguedSavepoint | None]] = []
        damaged: list[tuple[str, str]] = []
        for location in find_places(base, at_most=None):
            try:
                readable.append((summarized(opened_snapshot(location.url)), look_at(location)))
            except (CorruptFileError, NotFoundError) as error:
                damaged.append((location.url, _what_is_left(location) or str(error)))
    readable.sort(key=lambda found: (-found[0].completion_timestamp, found[0].location))
    document = [{**structs.asdict(found), "catalogue": _document(known)} for found, known in readable]
    document += [{"location": location, "error": reason} for location, reason in damaged]
    rows = [
        (
            found.kind,
            str(found.checkpoint_id),
            found.job_id,
            _name(known),
            time_text(found.completion_timestamp),
            f"{found.format.lower()} of {found.state_backend}",
            size_text(found.bytes),
            _checked(known),
            found.location,
        )
        for found, known in readable
    ]
    rows += [("unreadable", "-", "-", "-", "-", "-", "-", "-", location) for location, _ in damaged]
    columns = ("KIND", "ID", "JOB ID", "NAME", "COMPLETED", "FORMAT", "SIZE", "CHECKED", "LOCATION")
    cli.output.table(document, columns, rows, empty="no snapshots")


def _what_is_left(location: Location) -> str | None:
    from ckpt_runtime.snapshots.catalogue import look_at

    found = look_at(location)
    return None if found is None else found.problem


def _name(known: CataloguedSavepoint | None) -> str:
    name = None if known is None or known.entry is None else known.entry.job_name
    return "-" if name is None else shown_name(name)


def _checked(known: CataloguedSavepoint | None) -> str:
    """The checks that a savepoint has had, and which of them failed."""
    entry = None if known is None else known.entry
    if entry is None:
        return "-"
    if entry.disposing is not None:
        return "being deleted"
    newest = (("verified", "verification", entry.verifications), ("drilled", "drill", entry.drills))
    return ", ".join(done if marks[-1].passed else f"{what} failed" for done, what, marks in newest if marks) or "-"


def _document(known: CataloguedSavepoint | None) -> dict[str, Any] | None:
    """The entry as JSON; None for a checkpoint, and for a savepoint whose entry cannot be read."""
    if known is None or known.entry is None:
        return None
    entry = known.entry
    return {
        "good": known.is_good,
        "problem": known.problem,
        "job_name": entry.job_name,
        "lineage": entry.lineage_id,
        "program": entry.program,
        "configuration_version": entry.configuration_version,
        "cluster": entry.cluster,
        "taken_by": entry.taken_by,
        "duration_ms": entry.duration_ms,
        "verifications": [_mark(mark) for mark in entry.verifications],
        "drills": [_mark(mark) for mark in entry.drills],
    }


def _mark(mark: Mark) -> dict[str, Any]:
    return {
        "timestamp": mark.at_ms,
        "passed": mark.passed,
        "by": mark.by,
        "detail": mark.detail,
        "duration_ms": mark.duration_ms,
    }


def latest(
    cli: Cli,
    directory: DirectoryArgument,
    job: Annotated[str | None, typer.Option("--job", "-j", help="Id or name of the job that took it.")] = None,
    before: Annotated[
        datetime | None,
        typer.Option(
            "--before",
            formats=["%Y-%m-%dT%H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M:%S%z", "%Y-%m-%d"],
            help="Only savepoints that had completed by this time (UTC unless it has an offset): a job that starts "
            "from one reads everything since then again.",
        ),
    ] = None,
) -> None:
    """Print the latest good savepoint: complete, and without a failure in its newest verification and drill."""
    before = before.replace(tzinfo=UTC) if before is not None and before.tzinfo is None else before
    with storage_failures():
        from ckpt_runtime.snapshots.catalogue import latest_good

        found = latest_good(directory, job, None if before is None else int(before.timestamp() * 1000))
    if found is None or found.entry is None:
        of_job, by = ("" if job is None else f" of job {job}"), ("" if before is None else f" before {before}")
        raise CommandError(f"no good savepoint{of_job}{by} in {directory}", ExitCode.NOT_FOUND)
    entry = found.entry
    document = {
        "location": found.location,
        "job_id": entry.job_id,
        "completion_timestamp": entry.completed_at_ms,
        **(_document(found) or {}),
    }
    cli.output.result(document, found.location)


def verify(
    cli: Cli,
    snapshot: SnapshotArgument,
    mark: Annotated[
        bool, typer.Option("--mark/--no-mark", help="Record the result in the savepoint catalogue.")
    ] = True,
) -> ExitCode:
    """Read everything that belongs to a snapshot, and prove that it is complete and intact."""
    began = time.monotonic()
    with storage_failures():
        from ckpt_runtime.snapshots.inspection import verify_snapshot
        from ckpt_runtime.storage.errors import CorruptFileError

        try:
            opened = opened_snapshot(snapshot)
        except CorruptFileError as error:
            if mark:
                _note(cli, snapshot, began, [str(error)])
            raise
        problems = verify_snapshot(opened)
    if mark and opened.metadata.is_savepoint:
        _note(cli, opened.directory, began, [str(problem) for problem in problems])
    document = {
        "location": opened.directory.url,
        "intact": not problems,
        "problems": [{"state": problem.state, "reason": problem.reason} for problem in problems],
    }
    lines = [str(problem) for problem in problems] or [f"{opened.directory.url} is complete and intact."]
    cli.output.result(document, *lines)
    return ExitCode.FAILED if problems else ExitCode.OK


def _note(cli: Cli, savepoint: str | Location, began: float, problems: list[str]) -> None:
    """Record the result of a verification; a failure to record it does not change the result."""
    from ckpt_runtime.snapshots.catalogue import mark_damaged, mark_savepoint
    from ckpt_runtime.storage.errors import CorruptFileError, StorageError
    from ckpt_runtime.storage.savepoint_entry import Mark, MarkKind

    detail = f"{len(problems)} problems, the first: {problems[0]}" if problems else "complete and intact"
    result = Mark(
        time.time_ns() // 1_000_000, not problems, user_name(), detail, round((time.monotonic() - began) * 1000)
    )
    try:
        try:
            mark_savepoint(savepoint, MarkKind.VERIFICATION, result)
        except CorruptFileError:
            mark_damaged(savepoint, result)
    except StorageError as error:
        cli.output.note(f"the result is not recorded in the catalogue: {error}")


def leftovers(
    cli: Cli,
    directory: Annotated[
        str, typer.Argument(metavar="DIRECTORY", help="Output directory of a parquet sink: path or URL.")
    ],
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="Keep younger files, which may be in use.")
    ] = "1 d",
    pending: Annotated[
        bool, typer.Option("--pending", help="Also files that wait for a checkpoint; no snapshot may need them.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="SNAPSHOT", help="A checkpoint or savepoint whose files are kept; repeatable."),
    ] = None,
    remove: Annotated[
        bool, typer.Option("--remove", help="Delete the leftover files; without it, they are only listed.")
    ] = False,
) -> None:
    """List hidden files of sinks that no job owns; delete them with --remove."""
    from ckpt_runtime.connectors.part_directory import find_hidden_files, remove_hidden_file
    from ckpt_runtime.storage.errors import StorageError

    age_ms = framework.duration_ms("--older-than", older_than) or 0
    now_s = time.time()
    try:
        from ckpt_runtime.checkpoint.sink_state import pending_names
        from ckpt_runtime.snapshots.snapshot import open_snapshot

        covered = pending_names([open_snapshot(url).metadata for url in (keep or ())])
        files = find_hidden_files(directory)
        status = _asking(cli)
        verdicts = [_why_kept(file, now_s - age_ms / 1000, pending, covered, status) for file in files]
        left = [file for file, why in zip(files, verdicts, strict=True) if why is None]
        if remove:
            for file in left:
                remove_hidden_file(directory, file)
    except StorageError as error:
        raise CommandError(str(error), ExitCode.FAILED) from error
    _report(cli, files, verdicts, now_s, removed=remove)
    if left and not remove:
        cli.output.note(f"{len(left)} of {len(files)} hidden files are left over; --remove deletes them")


def _asking(cli: Cli) -> Callable[[str], str | None]:
    """A function that returns a job's state; None if the job manager does not know the job, or no manager is known.

    An explicitly given job manager that does not answer is an error, because it may run the jobs that own the files.
    """
    try:
        client = cli.client()
    except CommandError as error:
        if error.code is not ExitCode.USAGE or cli.is_given:
            raise
        cli.output.note("no job manager is known, so only the age shows whether a file is in use")
        return lambda _: None

    @cache
    def status(job_id: str) -> str | None:
        try:
            return client.job_status(framework.job_id(job_id))
        except (NotFound, typer.BadParameter):
            return None

    return status


def _why_kept(
    file: HiddenFile, oldest_s: float, pending: bool, covered: set[str], status: Callable[[str], str | None]
) -> str | None:
    """The reason to keep a file; None for a leftover file."""
    state = status(file.part.job_id)
    if state is not None and state not in TERMINAL_STATES:
        return f"the job is {state}"
    if file.part.hidden in covered:
        return "a snapshot given with --keep covers it"
    if file.part.checkpoint is not None and not pending:
        return f"snapshots from {file.part.checkpoint} on may need it"
    if file.modified_s > oldest_s:
        return "it is too young"
    return None


def _report(
    cli: Cli, files: Sequence[HiddenFile], verdicts: Sequence[str | None], now_s: float, *, removed: bool
) -> None:
    document, rows = [], []
    for file, why in zip(files, verdicts, strict=True):
        age_ms = int((now_s - file.modified_s) * 1000)
        document.append(
            {
                "name": file.part.hidden,
                "job_id": file.part.job_id,
                "checkpoint_id": file.part.checkpoint,
                "size": file.size,
                "age_ms": age_ms,
                "left_over": why is None,
                "removed": removed and why is None,
                "kept_because": why,
            }
        )
        verdict = ("removed" if removed else "left over") if why is None else f"kept: {why}"
        rows.append((file.part.hidden, size_text(file.size), duration_text(max(0, age_ms)), verdict))
    cli.output.table(document, ("FILE", "SIZE", "AGE", "VERDICT"), rows, empty="no hidden files")
