"""What tasks hand to each other: arguments that may be outputs of other tasks.

A property of an operator, such as ``submit.job_id``, is an output of one task. Airflow expands a task over whole
results only; so the arguments that name a job, a savepoint or a checkpoint also take the result that has it.
"""

from __future__ import annotations

from typing import TypeAlias, TypeVar

from airflow.sdk import XComArg

T = TypeVar("T")

Templated: TypeAlias = T | XComArg
"""An argument that is a template field: a value, a template that renders to one, or another task's output."""
