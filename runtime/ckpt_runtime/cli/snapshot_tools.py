"""``ckpt snapshot``: shows, copies, converts and releases snapshots in storage. Needs no session and no job."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.output import size_text, time_text
from ckpt_runtime.cli.snapshot_commands import FormatChoice
from ckpt_runtime.spark.installation import missing_modules

if TYPE_CHECKING:
    from ckpt_runtime.snapshots.snapshot import Snapshot
    from ckpt_runtime.storage.claims import Claimant

_NATIVE_FOR = "hashmap"
SnapshotArgument = Annotated[
    str, typer.Argument(metavar="SNAPSHOT", help="Directory of a savepoint or checkpoint: absolute path or URL.")
]


@contextmanager
def storage_failures() -> Iterator[None]:
    """Turn expected failures into errors of the command, each with its exit code."""
    try:
        from ckpt_runtime.state.errors import StateError
        from ckpt_runtime.storage import errors
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    try:
        yield
    except ModuleNotFoundError as error:
        raise _not_installed(error) from error
    except errors.NotFoundError as error:
        raise CommandError(str(error), ExitCode.NOT_FOUND) from error
    except errors.AlreadyExistsError as error:
        raise CommandError(str(error), ExitCode.CONFLICT) from error
    except (errors.CorruptFileError, StateError) as error:
        raise CommandError(str(error), ExitCode.FAILED) from error
    except errors.InvalidLocationError as error:
        raise CommandError(str(error), ExitCode.USAGE) from error
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(str(error), ExitCode.UNREACHABLE) from error


@contextmanager
def clean_ends() -> Iterator[None]:
    """Handle SIGTERM as an interruption, like Ctrl-C, so that partially written files are deleted first."""

    def interrupt(_signal: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _not_installed(error: ModuleNotFoundError) -> Exception:
    missing = missing_modules()
    if not missing:
        return error
    command = "pip install 'ckpt-runtime[session]'"
    return CommandError(
        f"reading snapshots needs {', '.join(missing)}, which cannot be imported; run: {command}", ExitCode.FAILED
    )


def opened_snapshot(path: str) -> Snapshot:
    """Open a snapshot. Raises the errors of ``open_snapshot``."""
    from ckpt_runtime.snapshots.snapshot import open_snapshot

    return open_snapshot(path)


def shown_name(name: str) -> str:
    """A name from an untrusted snapshot, without characters that a terminal would interpret."""
    return name if name.isprintable() else repr(name)


def show(
    cli: Cli,
    snapshot: SnapshotArgument,
    count: Annotated[
        bool, typer.Option("--count/--no-count", help="Count rows and keys, which reads all keyed state.")
    ] = True,
) -> None:
    """Show what a snapshot holds: operators, states, schemas, sizes, counts, and what wrote it."""
    with storage_failures():
        from ckpt_runtime.snapshots.inspection import states_of, summarized
        from ckpt_runtime.snapshots.snapshot import missing_files_as_damage

        opened = opened_snapshot(snapshot)
        with missing_files_as_damage():
            summary, states = summarized(opened), list(states_of(opened, count=count))
    if not cli.output.as_json:
        lines = {
            "location": summary.location,
            "kind": f"{summary.kind.lower().replace('_', ' ')} {summary.checkpoint_id} of job {summary.job_id}",
            "completed": time_text(summary.completion_timestamp),
            "format": f"{summary.format.lower()}, state backend {summary.state_backend}",
            "written by": summary.written_by or "unknown, from before releases were recorded",
            "size": f"{size_text(summary.bytes)}, {summary.files} files beside the metadata",
            "self-contained": "yes" if summary.self_contained else "no, it shares files with other checkpoints",
        }
        if summary.repositioned:
            places = (f"{uid} at {position}" for uid, position in sorted(summary.repositioned.items()))
            lines["set to continue"] = shown_name(", ".join(places))
        cli.output.result(None, *(f"{name + ':':<16} {text}" for name, text in lines.items()), "")
    rows = [
        (
            shown_name(state.operator),
            shown_name(state.state),
            state.kind,
            "-" if state.rows is None else state.rows,
            "-" if state.keys is None else state.keys,
            size_text(state.bytes),
            shown_name(", ".join(state.schema)) or "-",
        )
        for state in states
    ]
    document = {**structs.asdict(summary), "states": [structs.asdict(state) for state in states]}
    columns = ("OPERATOR", "STATE", "KIND", "ROWS", "KEYS", "SIZE", "SCHEMA")
    cli.output.table(document, columns, rows, empty="no state")


def copy(
    cli: Cli,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The snapshot: absolute path or URL.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new directory, in any file system.")],
) -> None:
    """Copy a self-contained snapshot to a new directory, verifying it on the way."""
    with storage_failures(), clean_ends(), cli.output.progress() as show_progress:
        from ckpt_runtime.snapshots.copying import copy_snapshot
        from ckpt_runtime.storage.filesystem import resolve

        def progress(done: int, total: int) -> None:
            show_progress(f"copied {done * 10 // max(total, 1) * 10} % of {size_text(total)}")

        copied = copy_snapshot(source, resolve(target), progress)
    document = {"location": copied.location, "files": copied.files, "bytes": copied.bytes}
    cli.output.result(document, copied.location)


def reposition(
    cli: Cli,
    source: Annotated[str, typer.Argument(metavar="SNAPSHOT", help="The snapshot: absolute path or URL.")],
    uid: Annotated[str, typer.Option("--uid", help="Uid of the source.")],
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="POSITION",
            help="earliest, latest, a time such as 2026-11-01T09:00 (UTC unless it has an offset), or a file with "
            "offsets as JSON.",
        ),
    ],
    target: Annotated[
        str | None, typer.Argument(metavar="[TARGET]", help="A new directory; default: one beside the snapshot.")
    ] = None,
) -> None:
    """Make a savepoint in which a source has another position, and all other state is as it was."""
    with storage_failures(), clean_ends(), cli.output.progress() as show_progress:
        from ckpt_runtime.snapshots.copying import default_target, reposition_snapshot
        from ckpt_runtime.snapshots.positions import position_text, start_position
        from ckpt_runtime.storage.filesystem import resolve

        try:
            position = start_position(_offsets_in(to), time.time_ns() // 1_000_000)
        except ValueError as error:
            raise CommandError(f"--to: {error}", ExitCode.USAGE) from error
        directory = default_target(resolve(source)) if target is None else resolve(target)

        def progress(done: int, total: int) -> None:
            show_progress(f"copied {done * 10 // max(total, 1) * 10} % of {size_text(total)}")

        made = reposition_snapshot(source, directory, {uid: position}, progress)
    document = {"location": made.location, "uid": uid, "position": position_text(position), "bytes": made.bytes}
    cli.output.note(f"Source {uid!r} continues at {position_text(position)} in a job that starts from it.")
    cli.output.result(document, made.location)


def _offsets_in(text: str) -> str:
    """The content of a file of offsets; any other text as it is."""
    if not text.endswith(".json"):
        return text
    try:
        return Path(text).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--to: {text} cannot be read: {error}", ExitCode.USAGE) from error


def convert(
    cli: Cli,
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="The snapshot: absolute path or URL.")],
    target: Annotated[str, typer.Argument(metavar="TARGET", help="A new directory, in any file system.")],
    format: Annotated[FormatChoice, typer.Option("--format", case_sensitive=False, help="Format of the copy.")],
    backend: Annotated[
        str | None,
        typer.Option(
            "--backend", metavar="NAME", help=f"State backend of the native savepoint; default: {_NATIVE_FOR}."
        ),
    ] = None,
) -> None:
    """Make a canonical or native savepoint of a snapshot, in a new directory."""
    if backend is not None and format is FormatChoice.CANONICAL:
        raise CommandError("--backend is for --format native: any backend restores a canonical one", ExitCode.USAGE)
    with storage_failures(), clean_ends(), cli.output.progress() as show_progress:
        from ckpt_runtime.checkpoint.properties import SavepointFormat
        from ckpt_runtime.snapshots.copying import convert_snapshot
        from ckpt_runtime.state.errors import UnsupportedBackendError
        from ckpt_runtime.state.registry import check_name
        from ckpt_runtime.storage.filesystem import resolve

        reading = _NATIVE_FOR if backend is None else backend
        try:
            check_name(reading)
        except UnsupportedBackendError as error:
            raise CommandError(f"--backend: {error}", ExitCode.USAGE) from error

        def progress(done: int, total: int) -> None:
            show_progress(f"converted the state of {done * 10 // total * 10} % of {total} subtasks")

        wanted = SavepointFormat(format.on_the_wire)
        converted = convert_snapshot(source, resolve(target), wanted, reading, progress)
    document = {"location": converted.location, "files": converted.files, "bytes": converted.bytes}
    cli.output.result(document, converted.location)


def release(
    cli: Cli,
    snapshot: SnapshotArgument,
    owner_is_dead: Annotated[
        str | None,
        typer.Option(
            "--owner-is-dead", metavar="JOB", help="Confirm that this job, which has claimed it, no longer exists."
        ),
    ] = None,
) -> None:
    """Release a snapshot whose claiming job no longer exists, so that it can be claimed or disposed of."""
    with storage_failures():
        from ckpt_runtime.processes.process_mark import is_gone
        from ckpt_runtime.storage import claims
        from ckpt_runtime.storage.filesystem import resolve
        from ckpt_runtime.storage.metadata import snapshot_directory

        place = claims.place_of_snapshot(snapshot_directory(resolve(snapshot)).real())
        claim = claims.read_claim(place)
        if claim is None:
            raise CommandError(f"no job has claimed {place.url}", ExitCode.NOT_FOUND)
        owner = claim.owner
        if not is_gone(owner.process):
            _check_is_dead(owner, owner_is_dead)
            claims.declare_owner_dead(place, claim)
    text = f"{place.url} is free: it was claimed by job {shown_name(owner.job_id)}, which no longer exists."
    cli.output.result({"place": place.url, "job": owner.job_id, "cluster": owner.cluster}, text)


def _check_is_dead(owner: Claimant, said: str | None) -> None:
    """Raises CommandError if the owner may be alive and the user has not confirmed that it is dead."""
    from ckpt_runtime.processes.process_mark import is_here
    from ckpt_runtime.storage.claims import SESSION_PREFIX
    from ckpt_runtime.storage.filesystem import resolve
    from ckpt_runtime.storage.ha_store import HaStore

    job, cluster = shown_name(owner.job_id), shown_name(owner.cluster)
    if is_here(owner.process):
        raise CommandError(f"job {job} may run: its session is a process of this machine; end the job there", _REFUSED)
    if not owner.cluster.startswith(SESSION_PREFIX):
        root = resolve(owner.cluster)
        if owner.job_id in HaStore(root.parent, root.name).jobs.list_ids():
            raise CommandError(f"job {job} is stored in {cluster}, whose leader runs it; end the job there", _REFUSED)
    if said != owner.job_id:
        raise CommandError(
            f"whether job {job} of {cluster} exists is unknown here. If it does not, confirm that with "
            f"--owner-is-dead {job}",
            _REFUSED,
        )


_REFUSED = ExitCode.CONFLICT
