"""What a new job starts from when that is "the latest of" another one.

A job has committed its output up to its latest checkpoint. So an older snapshot is not taken in the place of a latest
one that is gone, unless a savepoint is requested: what was written since would be written again.
"""

from __future__ import annotations

from typing import Final

from airflow_provider_ckpt.exceptions import CkptJobNotFound, CkptJobNotResumable
from airflow_provider_ckpt.jobs.names import resolve
from ckpt_runtime.client.checkpoint_models import Checkpoint, CheckpointStatistics
from ckpt_runtime.client.clients import AsyncCalls
from ckpt_runtime.client.errors import NotFound
from ckpt_runtime.client.models import TERMINAL_STATES, JobLine
from ckpt_runtime.client.waiting import until_final

KINDS: Final = ("ANY", "CHECKPOINT", "SAVEPOINT")
_WAYS_OUT: Final = "Give a path as savepoint_path, or if_no_snapshot='start' to begin with nothing"


async def latest_snapshot_of(client: AsyncCalls, job: str, kind: str, *, or_nothing: bool, pause: float) -> str | None:
    """Where the latest snapshot of the kind lies, of the living job of that id or name, or of the one that ended last.

    None only with ``or_nothing``: no such job, or one that has completed nothing and was started from nothing.

    :raises CkptJobNotFound: when there is no such job.
    :raises CkptJobNotResumable: when it has no such snapshot, or no longer.
    """
    try:
        line = await resolve(client, job, ended=True, pause=pause)
    except CkptJobNotFound:
        if or_nothing:
            return None
        raise
    try:
        if line.state in TERMINAL_STATES:
            await until_final(client, line.job_id)
        statistics: CheckpointStatistics | None = await client.checkpoint_statistics(line.job_id)
    except NotFound:  # a Flink job without checkpoints has none
        statistics = None
    path = None if statistics is None else chosen_path(line, statistics, kind)
    if path is None and not or_nothing:
        raise CkptJobNotResumable(f"{_named(line)} has no completed {_noun(kind)} to start from. {_WAYS_OUT}")
    return path


def chosen_path(line: JobLine, statistics: CheckpointStatistics, kind: str) -> str | None:
    """The path of the latest snapshot of the kind; None when the job has completed none and was restored from none.

    :raises CkptJobNotResumable: when the latest is gone.
    """
    found = [item for item in statistics.completed if _fits(item, kind)]
    if not found:
        restored = statistics.latest_restored
        return None if restored is None or statistics.counts.completed else restored.external_path
    kept = [item for item in found if item.external_path and not item.discarded]
    newest = max(found, key=lambda item: item.id)
    if kind == "SAVEPOINT":
        newest = max(kept, key=lambda item: item.id, default=newest)
    if newest not in kept:
        raise CkptJobNotResumable(
            f"the latest {_noun(kind)} of {_named(line)}, {newest.id}, is not retained "
            f"(execution.checkpointing.externalized-checkpoint-retention). {_WAYS_OUT}"
        )
    return newest.external_path


def _fits(item: Checkpoint, kind: str) -> bool:
    return kind == "ANY" or item.is_savepoint == (kind == "SAVEPOINT")


def _noun(kind: str) -> str:
    return "checkpoint or savepoint" if kind == "ANY" else kind.lower()


def _named(line: JobLine) -> str:
    return f"job {line.job_id} ({line.name!r}, {line.state})"
