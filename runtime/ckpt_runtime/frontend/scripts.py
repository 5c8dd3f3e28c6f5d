"""Plain PySpark scripts, which start their queries when they are run: how to recognize one, and how it sees time."""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def builds_session(module: ast.Module) -> bool:
    """Returns whether running a module builds a session, in its own statements or in a function that they may call.

    A file with functions that build one is a script only if it has statements for ``__main__``; otherwise it is a
    module that others import.
    """
    own = [statement for statement in module.body if not isinstance(statement, _DEFINITIONS)]
    return _names_builder(own) or (_names_main(own) and _names_builder(module.body))


def _names_builder(statements: Sequence[ast.stmt]) -> bool:
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Attribute) and node.attr == "builder":
                value = node.value
                if (value.attr if isinstance(value, ast.Attribute) else getattr(value, "id", "")) == "SparkSession":
                    return True
    return False


def _names_main(statements: Sequence[ast.stmt]) -> bool:
    tests = [statement.test for statement in statements if isinstance(statement, ast.If)]
    return any(isinstance(node, ast.Constant) and node.value == "__main__" for test in tests for node in ast.walk(test))


MOST_WAITS = 500
"""How often a script may wait for its queries with a limit of time."""


class ScriptEndedError(BaseException):
    """Ends a program at an action behind the start of its queries, whose rows are not there while it is planned.

    Not an ``Exception``, so that no program catches it.
    """


@dataclass(slots=True)
class ScriptClock:
    """The time of a script: its waits for queries return at once and are added up, because its job does not run yet.

    A query is known by its number, in the order of their starts. ``now_s`` is infinite when the script has waited until
    its queries end. ``stops`` are the times at which it has stopped queries.
    """

    now_s: float = 0.0
    stops: dict[int, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    processed: set[int] = field(default_factory=set)
    """The queries that were to process the data that is there."""
    terminated: bool = False
    """Whether a query has ended since the last ``resetTerminated``."""
    over: bool = False
    """Whether the program has ended at an action on rows: what it stops then, it stops at a time that is not known."""
    _end_themselves: list[bool] = field(default_factory=list)
    _ended: set[int] = field(default_factory=set)
    _waits: int = 0

    def started(self, *, ends: bool) -> None:
        """A query is started; whether it ends with the data that is there."""
        self._end_themselves.append(ends)

    def is_active(self, query: int) -> bool:
        """Whether a query has not ended for the script."""
        return self.now_s < math.inf and query not in self.stops and query not in self._ended

    @property
    def active(self) -> list[int]:
        return [query for query in range(len(self._end_themselves)) if self.is_active(query)]

    def wait(self, seconds: float | None) -> None:
        """Passes time, or all of it without ``seconds``.

        The last of :data:`MOST_WAITS` passes all of it, too, because the script waits in a loop. If the loop does not
        end then, SystemExit ends the script.
        """
        self._waits += 1
        if self._waits > 2 * MOST_WAITS:
            raise SystemExit
        if not self.active:
            return
        if self._waits >= MOST_WAITS:
            self.warnings.append(
                f"the program has waited {MOST_WAITS} times for its queries: the job runs without a limit of time"
            )
            seconds = None
        self.now_s += math.inf if seconds is None else seconds

    def await_query(self, query: int, seconds: float | None) -> bool:
        """Waits for a query; returns whether it has ended. One that ends with its data does so at once."""
        if self.is_active(query):
            if self._end_themselves[query]:
                self._ended.add(query)
                self.terminated = True
            else:
                self.wait(seconds)
        return not self.is_active(query)

    def await_any(self, seconds: float | None) -> bool:
        """Waits unless a query has ended; returns whether one has."""
        if not self.terminated and (active := self.active):
            self.await_query(next((query for query in active if self._end_themselves[query]), active[0]), seconds)
        return self.terminated or not self.active

    def stop(self, query: int) -> None:
        """Stops a query now, unless it has ended. One that ends with its data does so, and is not cut short."""
        if self.is_active(query) and not self.over:
            if self._end_themselves[query]:
                self._ended.add(query)
            else:
                self.stops[query] = self.now_s
            self.terminated = True

    def end(self) -> list[int]:
        """Ends the program. Returns the queries that end with the data that is there, which it has waited for."""
        self.over = True
        return [] if self.now_s else [query for query in self.active if query in self.processed]

    def stop_session(self) -> None:
        """Stops all queries, as the end of a session in Spark, if the script has waited for them."""
        if self.now_s:
            for query in self.active:
                self.stop(query)

    def ends_with_data(self, query: int) -> bool:
        """Whether a query was stopped as soon as it had processed the data that is there."""
        return query in self.processed and self.stops.get(query) == 0
