"""Errors of expressions: those that are raised at planning time, and those that a row causes."""

from __future__ import annotations


class UnsupportedExpressionError(Exception):
    """An expression that the engine cannot compute as Spark does. Raised when the plan is made."""

    def __init__(self, what: str, why: str = "the engine does not compute it as Spark does") -> None:
        super().__init__(f"{what}: {why}")
        self.what = what
        self.why = why
        self.place = ""

    def called_in(self, place: str) -> UnsupportedExpressionError:
        """Adds the author's file and line to the message, if they are known and the message lacks them."""
        if place and not self.place:
            self.place = place
            self.args = (f"{self.args[0]} (called in {place})",)
        return self


class UnsupportedTypeError(UnsupportedExpressionError):
    """A type that the engine does not support."""

    def __init__(self, type_: object) -> None:
        super().__init__(f"the type {type_}", "the engine does not support its values")


class EvaluationError(Exception):
    """A row for which Spark in ANSI mode fails too. ``condition`` is Spark's name of the error."""

    def __init__(self, condition: str, message: str) -> None:
        super().__init__(f"[{condition}] {message}")
        self.condition = condition


class ServiceError(RuntimeError):
    """A service that an expression asks did not answer: no row is bad because of that, and the job fails."""
