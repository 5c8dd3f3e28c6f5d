"""Planting bugs in the steps of an upgrade."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias
from unittest.mock import patch

from airflow_provider_ckpt.upgrades import steps
from airflow_provider_ckpt.upgrades.actions import Action, Answer
from airflow_provider_ckpt.upgrades.record import Step, Upgrade
from airflow_provider_ckpt.upgrades.steps import Ask, Turn

WrongStep: TypeAlias = Callable[[Upgrade, Turn], Awaitable[Upgrade | None]]


def replaced(step: Step, wrong: WrongStep) -> AbstractContextManager[Any]:
    """The step is another one."""
    return patch.dict(steps.STEPS, {step: wrong})


def asking(step: Step, wrong: Callable[[Action, Ask], Awaitable[Answer]]) -> AbstractContextManager[Any]:
    """Every request of the step goes through ``wrong``, which may send another one, or none."""
    right = steps.STEPS[step]

    async def altered(record: Upgrade, turn: Turn) -> Upgrade | None:
        async def ask(action: Action) -> Answer:
            return await wrong(action, turn.ask)

        return await right(record, Turn(ask, turn.now_ms))

    return patch.dict(steps.STEPS, {step: altered})


def ending(step: Step, wrong: Callable[[Upgrade, Upgrade | None], Upgrade | None]) -> AbstractContextManager[Any]:
    """The step's result goes through ``wrong``, which is given the record before it too."""
    right = steps.STEPS[step]

    async def altered(record: Upgrade, turn: Turn) -> Upgrade | None:
        return wrong(record, await right(record, turn))

    return patch.dict(steps.STEPS, {step: altered})
