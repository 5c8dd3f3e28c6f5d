"""Pipelines that are refused, each in its own way."""

from __future__ import annotations

import os

from ckpt_runtime.api import StreamSession


def raises(session: StreamSession) -> None:
    """The author's own mistake."""
    raise LookupError("the table of ports is missing")


def exits(session: StreamSession) -> None:
    """A script that ends itself."""
    os._exit(7)


def same_uids(session: StreamSession) -> None:
    """Two operators of one uid."""
    for _ in range(2):
        session.readStream.format("numbers").load().uid("twice").writeStream.format("noop").start()


def changes(session: StreamSession) -> None:
    """Builds another plan in every process."""
    session.readStream.format("numbers").load().uid(f"numbers-{os.getpid()}").writeStream.format("noop").uid(
        "s"
    ).start()
