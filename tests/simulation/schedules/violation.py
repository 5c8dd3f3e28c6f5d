"""What a checker raises."""

from __future__ import annotations


class Violation(AssertionError):
    """The protocol broke a promise."""
