"""Disposes of a snapshot that a user names, also of one whose owner is dead or has ended. Blocks; raises StorageError.

A claimed snapshot is treated as if a job claimed it and replaced it at once: the claim is taken over by the same rule
as for a job, and its files are deleted except those that a checkpoint of an earlier owner needs.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection

from ckpt_runtime.jobmaster.snapshot_claims import JobClaims, claim_snapshot, is_dead
from ckpt_runtime.process_mark import own_mark
from ckpt_runtime.snapshots.catalogue import dispose_of
from ckpt_runtime.snapshots.snapshot import open_snapshot
from ckpt_runtime.storage.claims import Claim, Claimant, acquire, claim_of, place_of_snapshot
from ckpt_runtime.storage.filesystem import Location, resolve
from ckpt_runtime.storage.snapshot_metadata import has_metadata, snapshot_directory


def dispose_of_snapshot(
    path: str, cluster: str, written: Collection[str] = (), ended: Collection[str] = frozenset()
) -> None:
    """Deletes the snapshot. After an error, a later call by any caller continues the deletion.

    ``written`` are URLs of directories in which living jobs of this ``cluster`` write checkpoints, ``ended`` the ids of
    its finished jobs. Raises :class:`ClaimedError` while the owner of a claim is not known to be dead or to have
    ended, and as ``dispose_of``.
    """
    directory = snapshot_directory(resolve(path)).real()
    claim = claim_of(directory)
    if claim is None:
        dispose_of(path)
        return
    claims = _taken_over(directory, claim, cluster, written, ended)
    try:
        dispose_of(directory.url, claims.release)
    except BaseException:
        claims.abandon()
        raise


def needs_it_no_more(owner: Claimant, cluster: str, ended: Collection[str]) -> bool:
    """Whether this owner certainly no longer acts: it is dead, or one of the ``cluster``'s ``ended`` jobs."""
    return is_dead(owner) or (owner.cluster == cluster and owner.job_id in ended)


def _taken_over(
    directory: Location, claim: Claim, cluster: str, written: Collection[str], ended: Collection[str]
) -> JobClaims:
    """Claims the snapshot for the disposal, an owner without checkpoints that no later driver continues."""
    place, name = place_of_snapshot(directory), f"disposal-{secrets.token_hex(8)}"
    claimant = Claimant(name, cluster, place.child(name).url, own_mark())

    def is_over(owner: Claimant) -> bool:
        return needs_it_no_more(owner, cluster, ended)

    if has_metadata(directory):
        return claim_snapshot(open_snapshot(directory).metadata, claimant, written, is_over)
    # The owner or an earlier disposal has already deleted the metadata: other places are no longer known.
    acquire(place, Claim(claimant, claim.snapshot), is_dead=is_over)
    return JobClaims(claimant, (place.url,))
