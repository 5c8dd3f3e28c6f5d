"""Checkpoints and savepoints of a job as assets: ``ckpt://<connection>/<job>/savepoints``, and what watches them.

A DAG that is scheduled on such an asset runs when a snapshot has completed; its event says which one. The job is named
by its name, so that the asset survives redeployments. Opens no connection.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote

from airflow.sdk import Asset, AssetWatcher

from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.triggers.snapshots import CHECKPOINTS, SAVEPOINTS, CkptSnapshotsTrigger

SCHEME: Final = "ckpt"
_KINDS: Final = (CHECKPOINTS, SAVEPOINTS)
_DEFAULT_INTERVAL_SECONDS: Final = 10.0


def savepoints_of(
    job: str,
    *,
    ckpt_conn_id: str = CkptHook.default_conn_name,
    poll_interval: float = _DEFAULT_INTERVAL_SECONDS,
    name: str | None = None,
) -> Asset:
    """Make the asset of a job's savepoints, those of stops included, which the triggerer watches.

    :param job: the job, by name or id.
    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param poll_interval: seconds between two looks.
    :param name: the asset's name; by default its URI.
    """
    return _watched(job, SAVEPOINTS, ckpt_conn_id, poll_interval, name)


def checkpoints_of(
    job: str,
    *,
    ckpt_conn_id: str = CkptHook.default_conn_name,
    poll_interval: float = _DEFAULT_INTERVAL_SECONDS,
    name: str | None = None,
) -> Asset:
    """Make the asset of a job's completed checkpoints, which the triggerer watches.

    :param job: the job, by name or id.
    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param poll_interval: seconds between two looks.
    :param name: the asset's name; by default its URI.
    """
    return _watched(job, CHECKPOINTS, ckpt_conn_id, poll_interval, name)


def _watched(job: str, snapshots: str, ckpt_conn_id: str, poll_interval: float, name: str | None) -> Asset:
    asset = create_asset(ckpt_conn_id=ckpt_conn_id, job=job, snapshots=snapshots, name=name)
    trigger = CkptSnapshotsTrigger(ckpt_conn_id=ckpt_conn_id, job=job, snapshots=snapshots, poll_interval=poll_interval)
    asset.watchers = [AssetWatcher(name=f"{snapshots} of {job}", trigger=trigger)]
    return asset


def create_asset(
    *,
    ckpt_conn_id: str,
    job: str,
    snapshots: str = SAVEPOINTS,
    name: str | None = None,
    extra: dict[str, Any] | None = None,
) -> Asset:
    """Make the asset without a watcher, such as an outlet of a task that takes savepoints.

    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param job: name or id of the job.
    :param snapshots: ``savepoints`` or ``checkpoints``.
    :param name: the asset's name; by default its URI.
    :param extra: JSON values that Airflow keeps with it.
    """
    uri = f"{SCHEME}://{ckpt_conn_id}/{quote(job, safe='')}/{snapshots}"
    return Asset(name=name or uri, uri=uri, group=SCHEME, extra=extra or {})


def sanitize_uri(uri: SplitResult) -> SplitResult:
    """Return the canonical form of an asset's URI.

    :param uri: the URI as the DAG author has written it.
    :raises ValueError: for a URI that does not name a job's snapshots.
    """
    parts = [unquote(part) for part in uri.path.strip("/").split("/")]
    if not uri.netloc or len(parts) != 2 or not parts[0] or parts[1] not in _KINDS:
        allowed = f"{SCHEME}://<connection id>/<job>/<{' or '.join(_KINDS)}>"
        raise ValueError(f"asset URI {uri.geturl()!r} is not acceptable, it must be {allowed}")
    return uri._replace(path=f"/{quote(parts[0], safe='')}/{parts[1]}", query="", fragment="")
