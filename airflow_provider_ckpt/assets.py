"""Checkpoints and savepoints of a job as assets: ``ckpt://<connection>/<job>/savepoints``, and what watches them.

A DAG that is scheduled on such an asset runs when a snapshot has completed; its event names it. A DAG that is
scheduled on an alert runs when something has been wrong for too long. The job is named by its name, so that the asset
survives redeployments. Opens no connection.
"""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import SplitResult, quote, unquote

from airflow.sdk import Asset, AssetWatcher

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Duration
from airflow_provider_ckpt.hooks.ckpt import CkptHook
from airflow_provider_ckpt.triggers.alerts import ALERTS, LAG, NO_CHECKPOINT, NO_SAVEPOINT, CkptAlertTrigger
from airflow_provider_ckpt.triggers.snapshots import CHECKPOINTS, SAVEPOINTS, CkptSnapshotsTrigger

SCHEME: Final = "ckpt"
_KINDS: Final = (CHECKPOINTS, SAVEPOINTS)
_DEFAULT_INTERVAL_SECONDS: Final = 10.0
_ALERT_INTERVAL_SECONDS: Final = 30.0


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
    :param poll_interval: seconds between two polls.
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
    :param poll_interval: seconds between two polls.
    :param name: the asset's name; by default its URI.
    """
    return _watched(job, CHECKPOINTS, ckpt_conn_id, poll_interval, name)


def no_checkpoint_for(
    job: str,
    longer_than: Duration,
    *,
    ckpt_conn_id: str = CkptHook.default_conn_name,
    poll_interval: float = _ALERT_INTERVAL_SECONDS,
    name: str | None = None,
) -> Asset:
    """Make the alert that a job has completed no checkpoint for too long, also if the job or its session is missing.

    :param job: the job, by name or id.
    :param longer_than: for how long.
    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param poll_interval: seconds between two polls.
    :param name: the asset's name; by default its URI.
    :raises CkptArgumentInvalid: for a value that cannot be used.
    """
    return _alert(job, NO_CHECKPOINT, longer_than, 0, ckpt_conn_id, poll_interval, name)


def no_savepoint_for(
    job: str,
    longer_than: Duration,
    *,
    ckpt_conn_id: str = CkptHook.default_conn_name,
    poll_interval: float = _ALERT_INTERVAL_SECONDS,
    name: str | None = None,
) -> Asset:
    """Make the alert that the newest savepoint of a job is too old.

    :param job: the job, by name or id.
    :param longer_than: how old it may be.
    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param poll_interval: seconds between two polls.
    :param name: the asset's name; by default its URI.
    :raises CkptArgumentInvalid: for a value that cannot be used.
    """
    return _alert(job, NO_SAVEPOINT, longer_than, 0, ckpt_conn_id, poll_interval, name)


def lag_above(
    job: str,
    rows: int,
    longer_than: Duration,
    *,
    ckpt_conn_id: str = CkptHook.default_conn_name,
    poll_interval: float = _ALERT_INTERVAL_SECONDS,
    name: str | None = None,
) -> Asset:
    """Make the alert that too many rows wait in front of a job's sources, for too long.

    :param job: the job, by name or id.
    :param rows: the number of rows that may wait.
    :param longer_than: for how long more may wait.
    :param ckpt_conn_id: the Airflow connection of the job manager.
    :param poll_interval: seconds between two polls.
    :param name: the asset's name; by default its URI.
    :raises CkptArgumentInvalid: for a value that cannot be used.
    """
    above = arguments.integer("rows", rows, minimum=0)
    return _alert(job, LAG, longer_than, above, ckpt_conn_id, poll_interval, name)


def _alert(
    job: str, alert: str, longer_than: Duration, above: int, conn_id: str, poll_interval: float, name: str | None
) -> Asset:
    seconds = arguments.millis("longer_than", longer_than) / 1000
    limit = f"{seconds:g}s" if alert != LAG else f"{above}-rows-{seconds:g}s"
    uri = f"{SCHEME}://{conn_id}/{quote(job, safe='')}/{alert}/{limit}"
    trigger = CkptAlertTrigger(
        ckpt_conn_id=conn_id,
        job=job,
        alert=alert,
        longer_than=seconds,
        above=above,
        poll_interval=arguments.pause("poll_interval", poll_interval),
    )
    watcher = AssetWatcher(name=f"{alert} of {job}", trigger=trigger)
    return Asset(name=name or uri, uri=uri, group=SCHEME, watchers=[watcher])


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
    is_snapshots = len(parts) == 2 and parts[1] in _KINDS
    is_alert = len(parts) == 3 and parts[1] in ALERTS and bool(parts[2])
    if not uri.netloc or not parts[0] or not (is_snapshots or is_alert):
        allowed = (
            f"{SCHEME}://<connection id>/<job>/<{' or '.join(_KINDS)}>, "
            f"or {SCHEME}://<connection id>/<job>/<{' or '.join(ALERTS)}>/<limit>"
        )
        raise ValueError(f"asset URI {uri.geturl()!r} is not acceptable, it must be {allowed}")
    path = "/".join(quote(part, safe="") for part in parts)
    return uri._replace(path=f"/{path}", query="", fragment="")
