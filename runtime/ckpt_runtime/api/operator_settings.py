"""Settings of one operator: uid, name, parallelism, chaining. They change the operator just written, and nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self

from ckpt_runtime.graph.errors import PlanError
from ckpt_runtime.graph.key_groups import UPPER_BOUND_MAX_PARALLELISM
from ckpt_runtime.graph.logical import Chaining, LogicalNode


class OperatorSettings(ABC):
    """Chainable setters for the operator that the object stands for."""

    @abstractmethod
    def _operator(self, method: str) -> LogicalNode:
        """The operator to change; raises PlanError naming ``method`` when there is not exactly one."""

    def uid(self, uid: str) -> Self:
        """The name that the operator's state is kept under, unique in the job and the same in its next versions."""
        self._operator("uid").uid = _text("uid", uid)
        return self

    def name(self, name: str) -> Self:
        """What pages and metrics call the operator."""
        self._operator("name").name = _text("name", name)
        return self

    def setParallelism(self, parallelism: int) -> Self:
        """Number of subtasks, 1 to the maximum parallelism."""
        self._operator("setParallelism").parallelism = _count("parallelism", parallelism)
        return self

    def setMaxParallelism(self, maxParallelism: int) -> Self:
        """Number of key groups: the greatest parallelism that the operator can ever have."""
        self._operator("setMaxParallelism").max_parallelism = _count("maxParallelism", maxParallelism)
        return self

    def disableChaining(self) -> Self:
        """Runs the operator in a thread of its own."""
        self._operator("disableChaining").chaining = Chaining.NEVER
        return self

    def startNewChain(self) -> Self:
        """Begins a new thread with this operator; those behind it may still be chained to it."""
        self._operator("startNewChain").chaining = Chaining.HEAD
        return self


def _text(field: str, value: str) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 255:
        raise PlanError(field, f"{value!r} is not a text of 1 to 255 characters")
    return value


def _count(field: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= UPPER_BOUND_MAX_PARALLELISM:
        raise PlanError(field, f"{value!r} is not a whole number from 1 to {UPPER_BOUND_MAX_PARALLELISM}")
    return value
