"""Settings of one operator: uid, name, parallelism, chaining. They change only the operator that was added last."""

# Names are PySpark's.
# ruff: noqa: N802, N803

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from ckpt_runtime.api.checks import checked_parallelism, checked_text
from ckpt_runtime.graph.logical import Chaining, LogicalNode


class OperatorSettings(ABC):
    """Chainable setters for the operator that this object represents."""

    @abstractmethod
    def _operator(self, method: str) -> LogicalNode:
        """The operator to change; raises PlanError naming ``method`` when there is not exactly one."""

    def uid(self, uid: str) -> Self:
        """Sets the id of the operator's state: unique in the job, and unchanged in later versions of the job.

        :param uid: that name.
        :raises PlanError: the stream does not come from exactly one operator
        """
        self._operator("uid").uid = checked_text("uid", uid)
        return self

    def name(self, name: str) -> Self:
        """Sets the operator's name on pages and in metrics.

        :param name: that name.
        :raises PlanError: the stream does not come from exactly one operator
        """
        self._operator("name").name = checked_text("name", name)
        return self

    def setParallelism(self, parallelism: int) -> Self:
        """Sets the number of subtasks, 1 to the maximum parallelism.

        :param parallelism: that number.
        :raises PlanError: another number, or a stream that does not come from exactly one operator
        """
        self._operator("setParallelism").parallelism = checked_parallelism("parallelism", parallelism)
        return self

    def setMaxParallelism(self, maxParallelism: int) -> Self:
        """Sets the number of key groups: the greatest parallelism that the operator can ever have.

        :param maxParallelism: 1 to 32768; it cannot change once there is a snapshot.
        :raises PlanError: another number, or a stream that does not come from exactly one operator
        """
        self._operator("setMaxParallelism").max_parallelism = checked_parallelism("maxParallelism", maxParallelism)
        return self

    def disableChaining(self) -> Self:
        """Runs the operator in its own thread."""
        self._operator("disableChaining").chaining = Chaining.NEVER
        return self

    def startNewChain(self) -> Self:
        """Starts a new chain with this operator; downstream operators may still be chained to it."""
        self._operator("startNewChain").chaining = Chaining.HEAD
        return self
