"""Commands about jobs: ``list``, ``info``, ``health``, ``cancel``, ``events``, ``rescale``, ``threads`` and ``logs``.

``program`` and ``lineage`` show and release uploaded programs and upgrades in progress.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.output import duration_text, size_text, time_text
from ckpt_runtime.client.errors import CkptApiError
from ckpt_runtime.client.event_stream import END, RESET, START
from ckpt_runtime.contract.checkpoints import Checkpoint, CheckpointStatistics
from ckpt_runtime.contract.configuration import Bounds, CheckpointConfig
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobDetails, Vertex, root_cause_line

JobArgument = Annotated[str, typer.Argument(metavar="JOB", help="Job id.", callback=framework.job_id)]
IncarnationOption = Annotated[
    int | None,
    typer.Option("--incarnation", metavar="N", min=1, help="Fail unless the job is this incarnation of its lineage."),
]
WaitTimeoutOption = Annotated[
    str | None, typer.Option("--wait-timeout", metavar="DURATION", help="Maximum time to wait, e.g. '5 min'.")
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
        document,
        *_job_lines(details),
        *_checkpoint_lines(statistics, config),
        *[
            f"Failure:     {time_text(entry.timestamp_ms)} {entry.task_name or ''} "
            f"{root_cause_line(entry.stack_trace) or entry.exception}"
            for entry in failures.entries[:1]
        ],
        "",
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


def cancel(
    cli: Cli,
    job: JobArgument,
    wait: Annotated[bool, typer.Option("--wait", "-w", help="Wait until it is canceled.")] = False,
    wait_timeout: WaitTimeoutOption = None,
    retain: Annotated[bool, typer.Option("--retain", help="Keep its checkpoints, whatever its options say.")] = False,
    incarnation: IncarnationOption = None,
) -> None:
    """Cancel a job without a savepoint."""
    timeout_s = framework.timeout_s("--wait-timeout", wait_timeout)
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


def health(cli: Cli, job: JobArgument) -> ExitCode:
    """Say whether a job is well, and why not. Exit code 1 for one that is UNHEALTHY."""
    found = cli.client().job_health(job)
    checkpoints, pressure = found.checkpoints, found.backpressure
    rate = "none has ended" if checkpoints.success_rate is None else f"{checkpoints.success_rate:.0%} of the last "
    if checkpoints.success_rate is not None:
        rate += f"{checkpoints.ended} completed"
    age = checkpoints.last_completed_age_ms
    cli.output.result(
        found,
        f"Health:       {found.verdict}",
        *(f"              {reason}" for reason in found.reasons),
        f"State:        {found.state}, {found.restarts} restarts",
        f"Checkpoints:  {rate}" + ("" if age is None else f", the last one {duration_text(age)} ago"),
        f"Backpressure: {pressure.ratio:.0%}" + (f", {pressure.vertex}" if pressure.vertex else ""),
    )
    return ExitCode.FAILED if found.verdict == "UNHEALTHY" else ExitCode.OK


JobsArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[JOB]...", help="Job ids; all jobs if none is given.", callback=framework.job_ids),
]


def events(
    cli: Cli,
    jobs: JobsArgument = None,
    after: Annotated[
        str | None,
        typer.Option("--after", metavar="ID", help="Continue after this event, by the id that an earlier line shows."),
    ] = None,
) -> None:
    """Print what happens to jobs, until these have ended, the session ends, or Ctrl-C."""
    client = cli.client()
    left = set(jobs or ())
    for event in client.follow_events(jobs or None, last_event_id=after):
        data = event.data
        parts = [time_text(data.get("timestamp")), event.job_id or "-", event.type, _telling(event.type, data)]
        cli.output.line(
            {"id": event.id, "type": event.type, **event.data}, "  ".join(part for part in (*parts, event.id) if part)
        )
        if event.type == RESET or (event.type == START and after is None):
            left = {job_id for job_id in left if client.job_status(job_id) not in TERMINAL_STATES}
        elif event.type == "job-status" and event.data.get("status") in TERMINAL_STATES:
            left.discard(event.job_id or "")
        if event.type == END or (jobs and not left):
            return


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


_DRIVER = "driver"
ProcessArgument = Annotated[
    str | None, typer.Argument(help="`driver`, or the id of a slot agent, such as 0-1; all of them if none is given.")
]


def threads(cli: Cli, process: ProcessArgument = None) -> ExitCode:
    """Show what the threads of the driver and of the workers do, also where tasks are stuck."""
    client = cli.client()
    return _show(cli, process, lambda agent: "".join(info.text for info in client.thread_dump(agent)))


def logs(cli: Cli, process: ProcessArgument = None) -> ExitCode:
    """Show the last lines that the driver and the workers have logged."""
    return _show(cli, process, cli.client().recent_log)


def _show(cli: Cli, process: str | None, read: Callable[[str | None], str]) -> ExitCode:
    """Show each process; one that does not answer does not prevent the others from being shown."""
    chosen = [process] if process else [_DRIVER, *(agent.id for agent in cli.client().slot_agents())]
    shown: dict[str, str] = {}
    failed = False
    for name in chosen:
        try:
            shown[name] = read(None if name == _DRIVER else name)
        except CkptApiError as error:
            if process:
                raise
            cli.output.note(f"{name}: {error}")
            failed = True
    lines = [f"=== {name}\n{text}" if len(chosen) > 1 else text for name, text in shown.items()]
    cli.output.result(shown, *lines)
    return ExitCode.FAILED if failed else ExitCode.OK


def release_lineage(cli: Cli, job: JobArgument) -> None:
    """End the upgrade of a job that is in progress, so that other clients can stop the job or start its successor.

    The upgrade itself ends when it finds that out. Use it when its task is gone for good.
    """
    client = cli.client()
    held = client.job_details(job).upgrade
    client.release_lineage(job)
    text = f"Job {job} was not being upgraded." if held is None else f"{held.owner} no longer upgrades job {job}."
    cli.output.result({"job_id": job, "released": None if held is None else held.owner}, text)


ProgramArgument = Annotated[str, typer.Argument(metavar="PROGRAM", help="Id of an uploaded pipeline.")]
OwnerOption = Annotated[str, typer.Option("--owner", help="Owner of the hold: 1 to 200 letters, digits and ._:@+-")]


def list_programs(cli: Cli) -> None:
    """List uploaded programs, newest first."""
    found = cli.client().list_pipelines()
    document = [
        {
            "id": program.id,
            "name": program.name,
            "uploaded_at_ms": program.uploaded_at_ms,
            "holders": [{"owner": holder.owner, "since_ms": holder.since_ms} for holder in program.holders],
        }
        for program in found
    ]
    rows = [
        (program.id, time_text(program.uploaded_at_ms), ", ".join(holder.owner for holder in program.holders))
        for program in found
    ]
    cli.output.table(document, ("PROGRAM", "UPLOADED", "HELD BY"), rows, empty="No programs.")


def hold_program(cli: Cli, program: ProgramArgument, owner: OwnerOption) -> None:
    """Keep a program until it is released; with high availability the next driver has it, too."""
    held = cli.client().hold_pipeline(program, owner)
    owners = [holder.owner for holder in held.holders]
    cli.output.result({"id": held.id, "holders": owners}, f"Program {held.id} is held by {', '.join(owners)}.")


def release_program(cli: Cli, program: ProgramArgument, owner: OwnerOption) -> None:
    """Give up a hold."""
    cli.client().release_pipeline(program, owner)
    cli.output.result({"id": program, "released": owner}, f"{owner} no longer holds program {program}.")


def rescale(
    cli: Cli,
    job: JobArgument,
    parallelism: Annotated[
        list[str],
        typer.Option(
            "--parallelism", "-p", metavar="N|VERTEX=N", help="For all vertices, or for one by id or name; repeatable."
        ),
    ],
    wait_timeout: WaitTimeoutOption = None,
) -> None:
    """Rescale a running job. It gets its slots and takes a checkpoint before anything is stopped."""
    timeout_s = framework.timeout_s("--wait-timeout", wait_timeout)
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
    parsed = [framework.parallelism("--parallelism", text) for text in given]
    for name, number in sorted(parsed, key=lambda pair: pair[0] is not None):
        chosen = [v for v in vertices if (v.max_parallelism > 1 if name is None else name in (v.id, v.name))]
        if name is not None and len(chosen) != 1:
            known = ", ".join(repr(vertex.name) for vertex in vertices)
            problem = "more than one vertex is" if chosen else "no vertex is"
            raise CommandError(f"--parallelism: {problem} {name!r}; name one of {known} or its id", ExitCode.USAGE)
        wanted.update((vertex.id, number) for vertex in chosen)
    return wanted
