"""``ckpt rescale``: changes the parallelism of a running job without stopping it first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.exit_codes import CommandError, ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.job_commands import JobArgument, WaitTimeoutOption
from ckpt_runtime.contract.configuration import Bounds
from ckpt_runtime.contract.jobs import Vertex


def rescale(
    cli: Cli,
    job: JobArgument,
    parallelism: Annotated[
        list[str],
        typer.Option(
            "--parallelism",
            "-p",
            metavar="N|VERTEX=N",
            help="Of all vertices, or of one by id or name; repeatable.",
        ),
    ],
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Rescale a running job. It gets its slots and takes a checkpoint before anything is stopped."""
    timeout_s = values.timeout_s("--wait-timeout", wait_timeout)
    client = cli.client()
    vertices = client.job_details(job).vertices
    wanted = _wanted(parallelism, vertices, client.parallelism_bounds(job))
    try:
        with cli.output.progress() as show:
            show(f"rescaling job {job}")
            client.rescale(job, wanted, timeout_s=timeout_s)
            client.wait_for_state(job, {"RUNNING"}, timeout_s=timeout_s)
    except KeyboardInterrupt:
        cli.output.note("the rescale continues")
        raise
    vertices = client.job_details(job).vertices
    now = {vertex.id: vertex.parallelism for vertex in vertices}
    lines = [f"  {vertex.parallelism:>4}  {vertex.name}" for vertex in vertices]
    cli.output.result({"job_id": job, "parallelism": now}, f"Job {job} is rescaled:", *lines)


def _wanted(given: Sequence[str], vertices: Sequence[Vertex], present: Mapping[str, Bounds]) -> dict[str, int | Bounds]:
    """The requested bounds of every vertex, by id; vertices that are not named keep their declared bounds.

    A number for all vertices skips those that cannot have more than one subtask.
    """
    wanted: dict[str, int | Bounds] = dict(present)
    parsed = [values.parallelism("--parallelism", text) for text in given]
    for name, number in sorted(parsed, key=lambda pair: pair[0] is not None):
        chosen = [v for v in vertices if (v.max_parallelism > 1 if name is None else name in (v.id, v.name))]
        if name is not None and len(chosen) != 1:
            known = ", ".join(repr(vertex.name) for vertex in vertices)
            problem = "more than one vertex is" if chosen else "no vertex is"
            raise CommandError(f"--parallelism: {problem} {name!r}; name one of {known} or its id", ExitCode.USAGE)
        wanted.update((vertex.id, number) for vertex in chosen)
    return wanted
