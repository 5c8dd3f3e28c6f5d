"""Publishes files that Spark's batch writer writes for a checkpoint, each exactly once.

Spark writes the rows of a checkpoint to a hidden directory of the attempt, beside the visible files. When Spark has
returned, the directory is renamed to mark it as complete. Then each file is moved to its visible location under the
unique name that Spark gave it. Finally the staged rows are deleted, and then the directory. A repetition continues
where the previous one was interrupted: if the staged rows are gone, all files have been moved; if there is a complete
directory, its remaining files are moved; otherwise Spark writes again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from ckpt_runtime.frontend.batch_writers import SparkWrite
from ckpt_runtime.sinks import SinkContext, Transaction
from ckpt_runtime.storage.errors import NotFoundError
from ckpt_runtime.storage.filesystem import (
    Location,
    delete_tree,
    exists,
    list_entries,
    list_names,
    make_directory,
    move_file,
    resolve,
)

_PREFIX = "_ckpt-"


class SparkFiles:
    """The output directory of a query that uses one of Spark's file formats."""

    def __init__(self, write: SparkWrite, context: SinkContext) -> None:
        self._write = write
        self._context = context
        self._target = resolve(write.path)

    def publish(self, transaction: Transaction, frame: Callable[[], Any]) -> None:
        """Makes the rows of a checkpoint visible; ``frame`` is called only if Spark has to write them."""
        complete = self._complete(transaction)
        if not exists(complete):
            written = self._target.child(f"{complete.name}-a{self._context.attempt}")
            self._write.to(frame(), written.url)
            move_file(written, complete)
        _move(complete, self._target)

    def finish(self, transaction: Transaction) -> None:
        """Removes the complete directory; call it after the staged rows were deleted."""
        delete_tree(self._complete(transaction))

    def clean_up(self) -> None:
        """Removes incomplete directories of attempts of this job, and of ended jobs with the same sink."""
        context = self._context
        jobs = "|".join((context.job_id, *context.ended_jobs))
        incomplete = re.compile(rf"{_PREFIX}{context.sink_id}-({jobs})-[0-9]+-a[0-9]+")
        try:
            names = list_names(self._target)
        except NotFoundError:
            return
        for name in names:
            if incomplete.fullmatch(name):
                delete_tree(self._target.child(name))

    def _complete(self, transaction: Transaction) -> Location:
        return self._target.child(f"{_PREFIX}{transaction.id}")


def _move(source: Location, target: Location) -> None:
    files, directories = list_entries(source)
    for file in files:
        name = file.location.name
        if not name.startswith(("_", ".")):
            move_file(file.location, target.child(name))
    for directory in directories:
        place = target.child(directory.name)
        make_directory(place, private=False)
        _move(directory, place)
