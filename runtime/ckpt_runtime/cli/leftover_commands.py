"""``ckpt leftovers``: hidden files that sinks left behind when their jobs and the driver were killed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.output import duration_text, size_text
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.contract.jobs import TERMINAL_STATES

if TYPE_CHECKING:
    from ckpt_runtime.connectors.leftovers import HiddenFile


def leftovers(
    cli: Cli,
    directory: Annotated[str, typer.Argument(metavar="DIRECTORY", help="Where a parquet sink writes: path or URL.")],
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="DURATION", help="Younger files may be in use, and stay.")
    ] = "1 d",
    pending: Annotated[
        bool, typer.Option("--pending", help="Also files that wait for a checkpoint: no snapshot may need them.")
    ] = False,
    keep: Annotated[
        list[str] | None,
        typer.Option("--keep", metavar="SNAPSHOT", help="A checkpoint or savepoint whose files stay; repeatable."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Delete what is left over; without it nothing is.")] = False,
) -> None:
    """List hidden files of sinks that no job owns; delete them with --remove."""
    from ckpt_runtime.connectors.leftovers import find_hidden_files, remove_hidden_file
    from ckpt_runtime.storage.errors import StorageError

    age_ms = values.duration_ms("--older-than", older_than) or 0
    now_s = time.time()
    try:
        covered = _covered(keep or ())
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


def _covered(snapshots: Sequence[str]) -> set[str]:
    """The names of the files that the snapshots need. Raises StorageError if a snapshot cannot be read."""
    from ckpt_runtime.checkpoint.sink_state import pending_names
    from ckpt_runtime.snapshots.snapshot import open_snapshot

    return pending_names([open_snapshot(url).metadata for url in snapshots])


def _asking(cli: Cli) -> Callable[[str], str | None]:
    """A function that returns a job's state; None if the job manager does not know the job, or no manager is known.

    An explicitly given job manager that does not answer is an error, because it may run the jobs that own the files.
    """
    try:
        client = cli.client()
    except CommandError as error:
        if error.code is not ExitCode.USAGE or cli.is_given:
            raise
        cli.output.note("no job manager is known, so only the age tells whether a file is in use")
        return lambda _: None

    @cache
    def status(job_id: str) -> str | None:
        try:
            return client.job_status(values.job_id(job_id))
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
        return "a snapshot to keep covers it"
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
