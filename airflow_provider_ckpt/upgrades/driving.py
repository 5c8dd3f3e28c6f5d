"""Going through the steps of an upgrade: perform, write down, go on. What performs and what writes is the caller's."""

from __future__ import annotations

from collections.abc import Callable

from airflow_provider_ckpt.upgrades.actions import Action, Answer
from airflow_provider_ckpt.upgrades.machine import WATCHES, action_of, advance
from airflow_provider_ckpt.upgrades.record import Step, Upgrade


def drive(
    record: Upgrade,
    perform: Callable[[Action], Answer],
    keep: Callable[[Upgrade], None],
    now_ms: Callable[[], int],
) -> Upgrade:
    """Goes on until there is something to watch, to decide, or nothing left. Each record is kept before it is used."""
    while record.step not in WATCHES and record.step is not Step.PAUSED:
        action = action_of(record)
        if action is None:
            break
        record = advance(record, perform(action), now_ms())
        keep(record)
    return record
