"""Runs the steps of an upgrade: perform, write down, continue. The caller provides what performs and what writes."""

from __future__ import annotations

from collections.abc import Callable

from airflow_provider_ckpt.upgrades.actions import Action, Answer, Lost
from airflow_provider_ckpt.upgrades.machine import WATCHES, action_of, advance, claim_of
from airflow_provider_ckpt.upgrades.record import Step, Upgrade


def drive(
    record: Upgrade,
    perform: Callable[[Action], Answer],
    keep: Callable[[Upgrade], None],
    now_ms: Callable[[], int],
) -> Upgrade:
    """Runs until it has to watch or a person has to decide, or nothing is left. Each record is kept before it is used.

    Nothing is done, watched or waited for without the lineage.
    """
    while (action := action_of(record)) is not None or record.step is Step.PAUSED:
        answer = perform(claim_of(record)) if record.step is not Step.RELEASE else None
        if not isinstance(answer, Lost):
            if action is None or record.step in WATCHES:
                break
            answer = perform(action)
        record = advance(record, answer, now_ms())
        keep(record)
    return record
