"""A pipeline that sets options of its job. Arguments: KEY=VALUE..."""

from __future__ import annotations

from ckpt_runtime.api import StreamSession


def pipeline(session: StreamSession, *options: str) -> None:
    """Builds the job, which never ends by itself."""
    for option in options:
        key, _, value = option.partition("=")
        session.conf.set(key, value)
    numbers = session.readStream.format("numbers").option("rowsPerSecond", 100).load().uid("numbers")
    numbers.writeStream.format("noop").uid("sink").start()
