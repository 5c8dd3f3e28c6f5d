"""How much tests with generated input try: a third in the suite, all of it with ``THOROUGH=1`` (``make test-long``)."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("THOROUGH", "0") != "0"


def examples(most: int) -> int:
    """How many of ``most`` examples to try now."""
    return most if THOROUGH else max(3, most // 3)
