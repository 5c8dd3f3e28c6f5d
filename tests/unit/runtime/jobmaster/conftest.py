from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.runtime.jobmaster.slot_world import World, opened


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """A slot pool whose provider answers at once."""
    async with opened() as made:
        yield made
