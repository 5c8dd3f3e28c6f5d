"""Files that Spark's batch writer writes for a checkpoint, each visible once.

Spark writes the rows of a checkpoint into a hidden directory of the attempt, beside the files that are visible. When it
has returned, the directory gets a name that says that it is complete. Then each file moves to the place that its
readers look at; the names are Spark's own, which are unique. At last the staged rows go, and then the directory. A
repetition continues where the one before it was interrupted: if the staged rows are gone, all files have moved; if
there is a complete directory, the rest of it moves; otherwise Spark writes again.
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
    """The directory that a query writes to in a format of files that Spark has."""

    def __init__(self, write: SparkWrite, context: SinkContext) -> None:
        self._write = write
        self._context = context
        self._target = resolve(write.path)

    def publish(self, transaction: Transaction, frame: Callable[[], Any]) -> None:
        """Makes the rows of a checkpoint visible; ``frame`` is asked for them only if Spark has to write."""
        complete = self._complete(transaction)
        if not exists(complete):
            written = self._target.child(f"{complete.name}-a{self._context.attempt}")
            self._write.to(frame(), written.url)
            move_file(written, complete)
        _move(complete, self._target)

    def finish(self, transaction: Transaction) -> None:
        """Removes the complete directory; to be called when the staged rows are gone."""
        delete_tree(self._complete(transaction))

    def clean_up(self) -> None:
        """Removes what attempts of this job, and of ended ones with the same sink, have not completed."""
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
