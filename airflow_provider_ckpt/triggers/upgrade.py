"""Waits for what an upgrade watches."""

from __future__ import annotations

from typing import Any

from airflow_provider_ckpt.conditions.upgrade import UpgradeCondition
from airflow_provider_ckpt.triggers.base import CkptTrigger
from airflow_provider_ckpt.upgrades.messages import standing
from airflow_provider_ckpt.upgrades.record import Upgrade


class CkptUpgradeTrigger(CkptTrigger):
    """Watches until there is something to do.

    :param record: where the upgrade stands.
    """

    def __init__(self, *, record: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.record = record

    def condition(self) -> UpgradeCondition:
        return UpgradeCondition(Upgrade.from_json(self.record))

    def arguments(self) -> dict[str, Any]:
        return {"record": self.record}

    async def on_kill(self) -> None:
        """Say where it stands: nothing is undone."""
        record = Upgrade.from_json(self.record)
        self.log.warning(
            "The task was killed at the step %s: %s. Nothing is undone; a cleared task goes on from there.",
            record.step,
            standing(record),
        )
