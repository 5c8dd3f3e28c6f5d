"""The error for everything that is wrong with a plan. The running job never raises it."""

from __future__ import annotations


class PlanError(ValueError):
    """A pipeline that cannot be planned. The message names the field, the value and what is allowed.

    ``field`` is the offending argument, option or column set, e.g. ``"groupBy"`` or ``"option 'path'"``.
    """

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem
