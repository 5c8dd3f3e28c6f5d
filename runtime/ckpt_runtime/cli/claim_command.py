"""``ckpt snapshot release``: releases the claim of a job that no longer exists. Needs no session."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.snapshot_tools import SnapshotArgument, shown_name, storage_failures

if TYPE_CHECKING:
    from ckpt_runtime.storage.claims import Claimant


def release(
    cli: Cli,
    snapshot: SnapshotArgument,
    owner_is_dead: Annotated[
        str | None,
        typer.Option("--owner-is-dead", metavar="JOB", help="Say that this job, which has claimed it, is no more."),
    ] = None,
) -> None:
    """Release a snapshot whose claiming job no longer exists, so that it can be claimed or disposed of."""
    with storage_failures():
        from ckpt_runtime.processes.process_mark import is_gone
        from ckpt_runtime.storage import claims
        from ckpt_runtime.storage.filesystem import resolve
        from ckpt_runtime.storage.snapshot_metadata import snapshot_directory

        place = claims.place_of_snapshot(snapshot_directory(resolve(snapshot)).real())
        claim = claims.read_claim(place)
        if claim is None:
            raise CommandError(f"no job has claimed {place.url}", ExitCode.NOT_FOUND)
        owner = claim.owner
        if not is_gone(owner.process):
            _check_is_dead(owner, owner_is_dead)
            claims.declare_owner_dead(place, claim)
    text = f"{place.url} is free: job {shown_name(owner.job_id)} has claimed it and is no more."
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
            f"whether job {job} of {cluster} lives cannot be seen from here. If it is no more, say so with "
            f"--owner-is-dead {job}",
            _REFUSED,
        )


_REFUSED = ExitCode.CONFLICT
