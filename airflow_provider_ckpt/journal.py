"""A task's record of its requests, made before they are sent, so that its next try finds the same things again.

A thin layer over Airflow's task state store, which survives a crash, a retry and *Clear*, and is another one for each
index of a mapped task. Without a store the journal keeps nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk.execution_time.context import NEVER_EXPIRE

if TYPE_CHECKING:
    from airflow.sdk import Context

_NAMESPACE = uuid.UUID("6f1d2c0e-7f0b-5a58-9d5e-0c3a6b1f9a44")


class Journal:
    """One JSON record of one task instance.

    :param context: the task's context.
    :param key: the record's name in the store.
    """

    def __init__(self, context: Context | Mapping[str, Any], key: str) -> None:
        self._store: Any = context.get("task_state_store")
        self._key = key

    @property
    def remembers(self) -> bool:
        """Whether there is a store."""
        return self._store is not None

    def read(self) -> dict[str, Any]:
        """Read the record, or an empty one."""
        found = None if self._store is None else self._store.get(self._key)
        return dict(found) if isinstance(found, dict) else {}

    def write(self, **fields: Any) -> dict[str, Any]:
        """Replace the record; it never expires. Returns it."""
        if self._store is not None:
            self._store.set(self._key, fields, retention=NEVER_EXPIRE)
        return fields

    def forget(self) -> None:
        """Delete the record, so that a cleared task starts from the beginning."""
        if self._store is not None:
            self._store.delete(self._key)


def new_id(context: Context | Mapping[str, Any], purpose: str) -> str:
    """Make an id for a request of this try: 32 hex digits, the same whenever this try asks for the same purpose."""
    return uuid.uuid5(_NAMESPACE, f"{context['ti'].id}/{purpose}").hex


def series_of(context: Context | Mapping[str, Any]) -> str:
    """Return a text that all tries of this task instance have in common, and no other instance or mapped index."""
    instance = context["ti"]
    parts = (instance.dag_id, instance.run_id, instance.task_id, getattr(instance, "map_index", -1))
    return "/".join(str(part) for part in parts)


def numbered_id(series: str, number: int) -> str:
    """Make the id of the ``number``-th job of a series: 32 hex digits."""
    return uuid.uuid5(_NAMESPACE, f"{series}/job/{number}").hex
