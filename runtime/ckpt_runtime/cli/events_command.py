"""``ckpt events``: prints job events as they happen, one line for each event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.output import duration_text, size_text, time_text
from ckpt_runtime.client.event_stream import END, RESET, START, StreamedEvent
from ckpt_runtime.contract.jobs import TERMINAL_STATES

JobsArgument = Annotated[
    list[str] | None, typer.Argument(metavar="[JOB]...", help="Job ids; all jobs without any.", callback=values.job_ids)
]


def events(
    cli: Cli,
    jobs: JobsArgument = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="ID", help="Continue after this event, whose id an earlier line shows."),
    ] = None,
) -> None:
    """Print what happens to jobs, until these have ended, the session ends, or Ctrl-C."""
    client = cli.client()
    left = set(jobs or ())
    for event in client.follow_events(jobs or None, last_event_id=after):
        cli.output.line({"id": event.id, "type": event.type, **event.data}, _text(event))
        if event.type == RESET or (event.type == START and after is None):
            left = {job_id for job_id in left if client.job_status(job_id) not in TERMINAL_STATES}
        elif event.type == "job-status" and event.data.get("status") in TERMINAL_STATES:
            left.discard(event.job_id or "")
        if event.type == END or (jobs and not left):
            return


def _text(event: StreamedEvent) -> str:
    data = event.data
    parts = [time_text(data.get("timestamp")), event.job_id or "-", event.type, _telling(event.type, data)]
    return "  ".join(part for part in (*parts, event.id) if part)


def _telling(kind: str, data: Mapping[str, Any]) -> str:
    match kind:
        case "job-status" | "failure":
            cause = data.get("cause")
            why = "" if cause is None else f"{cause['exception']}: {cause['message']}".partition("\n")[0]
            return " ".join(part for part in (data.get("status", ""), why) if part)
        case "checkpoint-completed" | "savepoint-completed":
            took, size = duration_text(data["end_to_end_duration"]), size_text(data["checkpointed_size"])
            return f"{data['id']} in {took}, {size} written: {data['external_path']}"
        case "checkpoint-failed" | "savepoint-failed":
            return f"{data['id']}: {data['failure_message']}"
        case "checkpoint-triggered" | "savepoint-triggered":
            return str(data["id"])
        case _ if kind in (START, RESET, END):
            return str(data.get("reason") or data.get("session", ""))
        case _:
            return " ".join(f"{key}={value}" for key, value in data.items() if key not in ("jobid", "timestamp"))
