"""How much the fuzz tests try: little in the suite, as much as ``FUZZ_EXAMPLES`` says in ``make fuzz``."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

from tests.support.patience import patient

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
LONG = EXAMPLES > 0

ANSWER_S = patient(60.0)
"""A request that is not answered within this time hangs; generous, because whole machines pause."""


def budget(short: int) -> settings:
    """``short`` examples, always the same ones, or new ones in a long run."""
    return settings(
        max_examples=EXAMPLES or short,
        deadline=None,
        derandomize=not LONG,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
