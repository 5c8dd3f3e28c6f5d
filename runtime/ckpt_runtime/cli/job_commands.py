"""``ckpt list``, ``ckpt info``, ``ckpt cancel``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ckpt_runtime.cli import values
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.output import duration_text, size_text, time_text
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointStatistics
from ckpt_runtime.contract.configuration import CheckpointConfig
from ckpt_runtime.contract.jobs import TERMINAL_STATES, ExceptionHistory, JobDetails
from ckpt_runtime.contract.stack_traces import root_cause_line

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.", callback=values.job_id)]
IncarnationOption = Annotated[
    int | None,
    typer.Option("--incarnation", metavar="N", min=1, help="Refuse unless the job is this incarnation of its lineage."),
]
WaitTimeoutOption = Annotated[
    str | None, typer.Option("--wait-timeout", metavar="DURATION", help="Give up waiting after this, e.g. '5 min'.")
]


def list_jobs(
    cli: Cli, everything: Annotated[bool, typer.Option("--all", "-a", help="Ended jobs too.")] = False
) -> None:
    """List jobs."""
    jobs = [job for job in cli.client().list_jobs() if everything or job.state not in TERMINAL_STATES]
    rows = [
        (
            job.job_id,
            job.state,
            f"{job.tasks.get('running', 0)}/{job.tasks.get('total', 0)}",
            time_text(job.start_time_ms),
            duration_text(job.duration_ms),
            job.name,
        )
        for job in jobs
    ]
    columns = ("JOB ID", "STATE", "TASKS", "STARTED", "DURATION", "NAME")
    cli.output.table(jobs, columns, rows, empty="No jobs." if everything else "No running jobs.")


def info(cli: Cli, job: JobArgument) -> None:
    """Show one job with its vertices, checkpoints and latest failure."""
    client = cli.client()
    details = client.job_details(job)
    statistics = client.checkpoint_statistics(job)
    config = client.checkpoint_config(job)
    failures = client.job_exceptions(job, 1)
    document = {"job": details, "checkpoints": statistics, "checkpoint_config": config, "failures": failures}
    if cli.output.as_json:
        cli.output.result(document)
        return
    cli.output.result(
        document, *_job_lines(details), *_checkpoint_lines(statistics, config), *_failure_lines(failures), ""
    )
    rows = [
        (
            vertex.name,
            vertex.state,
            vertex.parallelism,
            f"{vertex.io.read_records:,}",
            f"{vertex.io.write_records:,}",
            duration_text(vertex.io.backpressured_ms),
            duration_text(int(vertex.io.busy_ms)),
        )
        for vertex in details.vertices
    ]
    columns = ("VERTEX", "STATE", "PARALLELISM", "RECORDS IN", "RECORDS OUT", "BACKPRESSURED", "BUSY")
    cli.output.table(document, columns, rows, empty="No vertices.")


def _job_lines(details: JobDetails) -> list[str]:
    why = f": {details.status_reason}" if details.status_reason else ""
    return [
        f"Job:         {details.job_id}  {details.name}",
        *(
            []
            if details.incarnation is None
            else [f"Lineage:     {details.lineage}, incarnation {details.incarnation}"]
        ),
        f"State:       {details.state} since {time_text(details.timestamps_ms.get(details.state))}{why}",
        f"Started:     {time_text(details.start_time_ms)}, {duration_text(details.duration_ms)} ago"
        if details.end_time_ms < 0
        else f"Ended:       {time_text(details.end_time_ms)}, after {duration_text(details.duration_ms)}",
    ]


def _checkpoint_lines(statistics: CheckpointStatistics, config: CheckpointConfig) -> list[str]:
    counts = statistics.counts
    interval = "off" if config.interval_ms is None else duration_text(config.interval_ms)
    overrides = f", overridden: {', '.join(config.overrides)}" if config.overrides else ""
    unaligned = ", unaligned" if config.unaligned else ""
    lines = [
        (
            f"Checkpoints: {counts.completed} completed, {counts.failed} failed, {counts.in_progress} in progress; "
            f"interval {interval}, timeout {duration_text(config.timeout_ms)}{unaligned}{overrides}"
        )
    ]
    lines += [f"Pending:     {_pending_text(found)}" for found in statistics.history if found.status == "IN_PROGRESS"]
    for title, checkpoint in (("Latest:", statistics.latest_completed), ("Savepoint:", statistics.latest_savepoint)):
        if checkpoint is not None:
            lines.append(f"{title:<13}{_checkpoint_text(checkpoint)}")
    if statistics.latest_failed is not None:
        failed = statistics.latest_failed
        lines.append(f"Failed:      {failed.id} at {time_text(failed.failed_at_ms)}: {failed.failure_message}")
    if statistics.latest_restored is not None:
        restored = statistics.latest_restored
        lines.append(f"Restored:    {restored.id} from {restored.external_path}")
    return lines


def _pending_text(checkpoint: Checkpoint) -> str:
    text = f"{checkpoint.id} since {time_text(checkpoint.triggered_at_ms)}, "
    text += f"{checkpoint.num_acknowledged} of {checkpoint.num_subtasks} subtasks"
    if checkpoint.progress_size is not None:
        text += f", {size_text(checkpoint.progress_size)} persisted"
    if checkpoint.deadline_ms is not None:
        text += f", expires at {time_text(checkpoint.deadline_ms)}"
    return text + _extension_text(checkpoint)


def _extension_text(checkpoint: Checkpoint) -> str:
    extension = checkpoint.timeout_extension_ms
    return f", timeout extended by {duration_text(extension)}" if extension else ""


def _checkpoint_text(checkpoint: Checkpoint) -> str:
    return (
        f"{checkpoint.id} at {time_text(checkpoint.triggered_at_ms)} in {duration_text(checkpoint.duration_ms)}, "
        f"{size_text(checkpoint.checkpointed_size)} of {size_text(checkpoint.state_size)}, {checkpoint.external_path}"
        f"{_extension_text(checkpoint)}"
    )


def _failure_lines(failures: ExceptionHistory) -> list[str]:
    return [
        f"Failure:     {time_text(entry.timestamp_ms)} {entry.task_name or ''} "
        f"{root_cause_line(entry.stack_trace) or entry.exception}"
        for entry in failures.entries[:1]
    ]


def cancel(
    cli: Cli,
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until it is canceled.")] = False,
    wait_timeout: WaitTimeoutOption = None,
    retain: Annotated[bool, typer.Option("--retain", help="Keep its checkpoints, whatever its options say.")] = False,
    incarnation: IncarnationOption = None,
) -> None:
    """Cancel a job without a savepoint."""
    timeout_s = values.timeout_s("--wait-timeout", wait_timeout)
    client = cli.client()
    call = client.cancel_and_retain if retain else client.cancel_job
    kept = call(job, incarnation=incarnation)
    if wait:
        client.wait_for_state(job, {"CANCELED"}, timeout_s=timeout_s)
        kept = client.cancel_and_retain(job) if retain else None  # one may have completed since the first answer
    document: dict[str, Any] = {"job_id": job}
    lines = [f"Job {job} {'is canceled' if wait else 'is being canceled'}."]
    if retain:
        document["retained_checkpoint"] = None if kept is None else kept.external_path
        lines.append("No checkpoint has completed." if kept is None else f"Retained: {kept.external_path}")
    cli.output.result(document, *lines)
