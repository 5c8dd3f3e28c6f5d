"""``ckpt run`` starts a job, and ``ckpt plan`` shows what it would run.

An attached ``run`` shows the job until it ends. ``plan`` also shows whether a snapshot fits, and starts nothing.
``run --client`` runs a script here, whose queries become jobs.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import quote, urlsplit

import msgspec
import typer

from ckpt_runtime.cli import framework
from ckpt_runtime.cli.framework import Cli, CommandError, ExitCode
from ckpt_runtime.cli.output import size_text
from ckpt_runtime.client import requests
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import CkptClientError
from ckpt_runtime.client.packaging import pack_pipeline, pack_script
from ckpt_runtime.client.waiting import watch
from ckpt_runtime.configuration.cluster_options import ConnectOptions, SecurityOptions
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.contract.checkpoints import CheckpointStatistics
from ckpt_runtime.contract.jobs import TERMINAL_STATES, JobDetails, RestorePreview, RunOptions

if TYPE_CHECKING:
    from ckpt_runtime.connect.script import SubmittedScript

WATCH_INTERVAL_S = 1.0


class ClaimChoice(StrEnum):
    """FLIP-193's restore modes as users type them."""

    NO_CLAIM = "no-claim"
    CLAIM = "claim"


PipelineArgument = Annotated[Path, typer.Argument(metavar="PIPELINE", help="A .py file, a .zip or a directory.")]
ArgumentsArgument = Annotated[list[str] | None, typer.Argument(metavar="[ARGS]...", help="For the pipeline.")]
SavepointOption = Annotated[
    str | None, typer.Option("--from-savepoint", "-s", metavar="PATH", help="Savepoint or checkpoint to start from.")
]
NonRestoredOption = Annotated[
    bool, typer.Option("--allow-non-restored-state", "-n", help="Skip state that belongs to no operator.")
]
ParallelismOption = Annotated[int | None, typer.Option("--parallelism", "-p", min=1, help="Default parallelism.")]
DefineOption = Annotated[
    list[str] | None, typer.Option("-D", metavar="KEY=VALUE|@FILE", help="Configuration of the job; repeatable.")
]
EntryOption = Annotated[
    str | None, typer.Option("--entry", "-c", metavar="MODULE:FUNCTION", help="Entry point of the pipeline.")
]


def run(  # noqa: PLR0913 -- one parameter for each option
    cli: Cli,
    pipeline: PipelineArgument,
    arguments: ArgumentsArgument = None,
    detached: Annotated[bool, typer.Option("--detached", "-d", help="Do not wait for the job's end.")] = False,
    from_savepoint: SavepointOption = None,
    allow_non_restored_state: NonRestoredOption = False,
    claim_mode: Annotated[
        ClaimChoice, typer.Option("--claim-mode", case_sensitive=False, help="Owner of that snapshot afterwards.")
    ] = ClaimChoice.NO_CLAIM,
    parallelism: ParallelismOption = None,
    define: DefineOption = None,
    entry: EntryOption = None,
    job_id: Annotated[
        str | None, typer.Option("--job-id", help="Id of the job.", callback=framework.optional_job_id)
    ] = None,
    drill: Annotated[
        bool, typer.Option("--drill", help="Restore drill of that snapshot: nothing outside the job is changed.")
    ] = False,
    fork: Annotated[
        bool,
        typer.Option("--fork", help="The job writes to another output, and may run beside the job of that snapshot."),
    ] = False,
    source_position: Annotated[
        list[str] | None,
        typer.Option(
            "--source-position",
            metavar="UID=POSITION|@FILE",
            help="Where a source continues instead of its position in that snapshot: earliest, latest, a time such "
            "as 2026-11-01T09:00, or a file with offsets as JSON; repeatable.",
        ),
    ] = None,
    as_client: Annotated[
        bool,
        typer.Option(
            "--client", help="Run a script in this terminal; each query that it starts is a job. Needs Spark Connect."
        ),
    ] = False,
) -> ExitCode:
    """Run a pipeline. Attached, it shows progress and ends as the job ends; Ctrl-C leaves the job running."""
    if as_client:
        of_one_job = {
            "--from-savepoint": from_savepoint,
            "--allow-non-restored-state": allow_non_restored_state,
            "--claim-mode claim": claim_mode is ClaimChoice.CLAIM,
            "--entry": entry,
            "--job-id": job_id,
            "--drill": drill,
            "--fork": fork,
            "--source-position": source_position,
        }
        for option, given in of_one_job.items():
            if given:
                message = f"{option}: it cannot be given together with --client, because a script has a job per query"
                raise CommandError(message, ExitCode.USAGE)
        configuration = framework.pairs("-D", define or ())
        if parallelism is not None:
            configuration[PipelineOptions.PARALLELISM.key] = str(parallelism)
        _become_script(cli, pipeline, arguments or (), configuration, keeps_queries=detached)
    options = RunOptions(
        entry_point=entry,
        arguments=tuple(arguments or ()),
        parallelism=parallelism,
        configuration=framework.pairs("-D", define or ()),
        savepoint_path=from_savepoint,
        allow_non_restored_state=allow_non_restored_state,
        claim_mode=claim_mode.name,
        fork=fork,
        source_positions=framework.pairs("--source-position", source_position or ()),
    )
    if options.source_positions and from_savepoint is None:
        raise CommandError("--source-position needs --from-savepoint, whose positions it changes", ExitCode.USAGE)
    if drill and from_savepoint is None:
        raise CommandError("--drill needs --from-savepoint, the snapshot to restore", ExitCode.USAGE)
    filename, content = pack_pipeline(pipeline)
    client = cli.client()
    start = client.run_drill if drill else client.run_pipeline
    job = start(client.upload_pipeline(filename, content), options, job_id=job_id)
    with suppress(CkptClientError):  # the job is started even so
        details = client.job_details(job)
        for text in details.explained:
            cli.output.note(text)
        for warning in details.warnings:
            cli.output.note(f"warning: {warning}")
    if detached:
        cli.output.result({"job_id": job}, job)
        return ExitCode.OK
    cli.output.note(f"Job {job} is submitted.")
    try:
        details = _watch(cli, client, job)
    except KeyboardInterrupt:
        cli.output.note(f"Job {job} keeps running; 'ckpt cancel {job}' ends it.")
        raise
    return _report_end(cli, client, details)


def _become_script(
    cli: Cli, file: Path, arguments: Sequence[str], configuration: Mapping[str, str], *, keeps_queries: bool
) -> NoReturn:
    """Replaces this process by the script's, whose exit code, output and signals are therefore those of the command."""
    from ckpt_runtime.connect.script import KEEP_VARIABLE, SubmittedScript
    from ckpt_runtime.spark.installation import PySparkMismatchError, check_pyspark

    try:
        check_pyspark()
    except PySparkMismatchError as error:
        raise CommandError(str(error), ExitCode.FAILED) from error
    if file.suffix != ".py" or not file.is_file():
        raise CommandError(f"--client: {file} is not a file of Python, which has to end with .py", ExitCode.USAGE)
    port = cli.client().dashboard_config().get("connect-port")
    if port is None:
        raise CommandError(
            f"--client: {cli.client().url} does not serve Spark Connect; start the session with "
            f"-D {ConnectOptions.ENABLED.key}=true",
            ExitCode.CONFLICT,
        )
    if cli.settings.insecure:
        raise CommandError("--insecure: PySpark always checks the certificate; give --ca-file", ExitCode.USAGE)
    # Workers run the file, too, if its queries call functions of it or of the modules beside it.
    module, content = pack_script(file)
    program = cli.client().upload_pipeline(f"{module}.zip", content)
    script = SubmittedScript(program, module, list(arguments), dict(configuration))
    # The mode is enabled from the beginning: the script may define functions before it makes its session.
    environment = {**os.environ, "SPARK_CONNECT_MODE_ENABLED": "1"}
    environment["SPARK_REMOTE"] = connect_address(cli.client().url, port, cli.address()[1], script)
    if cli.settings.ca_file is not None:
        environment["GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"] = cli.settings.ca_file
    if keeps_queries:
        environment[KEEP_VARIABLE] = "1"
    cli.close()
    command = [sys.executable, "-m", "ckpt_runtime.connect.script", str(file), *arguments]
    os.execve(sys.executable, command, environment)


def connect_address(url: str, port: int, token: str | None, script: SubmittedScript) -> str:
    """The address of Spark Connect in the form of ``SPARK_REMOTE``, with the script that will be the client.

    ``url`` is that of the REST API. Raises CommandError if PySpark would not send the token there.
    """
    from ckpt_runtime.connect.script import SCRIPT_KEY

    parts = urlsplit(url)
    host, secure = parts.hostname or "", parts.scheme == "https"
    with suppress(ValueError):
        # The only name with which PySpark sends a token without TLS.
        host = "localhost" if not secure and ip_address(host).is_loopback else host
    if token is not None and not secure and host != "localhost":
        raise CommandError(
            f"--client: PySpark sends a token only over TLS or to localhost, and not to {host}: set "
            f"{SecurityOptions.REST_ENABLED.key}",
            ExitCode.CONFLICT,
        )
    parameters = {
        "token": token,
        "use_ssl": "true" if secure else None,
        SCRIPT_KEY: json.dumps(msgspec.to_builtins(script)),
    }
    texts = (f";{name}={quote(value, safe='')}" for name, value in parameters.items() if value is not None)
    return f"sc://{f'[{host}]' if ':' in host else host}:{port}/{''.join(texts)}"


def _watch(cli: Cli, client: CkptClient, job: str) -> JobDetails:
    with cli.output.progress() as show:

        async def look(retry_timeout_s: float) -> JobDetails | None:
            details = await client.calls.execute(requests.job_details(job), retry_timeout_s=retry_timeout_s)
            statistics = await client.calls.execute(
                requests.checkpoint_statistics(job), retry_timeout_s=retry_timeout_s
            )
            show(_progress_text(details, statistics, live=cli.output.decorated))
            return details if details.state in TERMINAL_STATES else None

        return client.run(watch(look, f"The end of job {job}", None, WATCH_INTERVAL_S))


def _progress_text(details: JobDetails, statistics: CheckpointStatistics, *, live: bool) -> str:
    """The progress as text. Off a terminal each change is printed as a line, so it has only what rarely changes."""
    text = details.state
    if live:
        records = sum(vertex.io.write_records for vertex in details.vertices)
        text += f"  {records:,} records sent"
    latest = statistics.latest_completed
    if latest is not None and live:
        text += f"  checkpoint {latest.id}, {size_text(latest.state_size)}"
    return text


def _report_end(cli: Cli, client: CkptClient, details: JobDetails) -> ExitCode:
    code = ExitCode.OK if details.state == "FINISHED" else ExitCode.FAILED
    failure = client.execution_result(details.job_id).failure if details.state == "FAILED" else None
    document = {
        "job_id": details.job_id,
        "state": details.state,
        "failure": None if failure is None else failure.message,
    }
    cli.output.result(document, f"Job {details.job_id} {details.state}")
    if failure is not None:
        cli.output.note(failure.stack_trace.rstrip())
    return code


def plan(
    cli: Cli,
    pipeline: PipelineArgument,
    arguments: ArgumentsArgument = None,
    from_savepoint: SavepointOption = None,
    allow_non_restored_state: NonRestoredOption = False,
    parallelism: ParallelismOption = None,
    define: DefineOption = None,
    entry: EntryOption = None,
) -> ExitCode:
    """Plan a pipeline and see how a snapshot fits it. Starts nothing; ends with 1 if the snapshot would be refused."""
    options = RunOptions(
        entry_point=entry,
        arguments=tuple(arguments or ()),
        parallelism=parallelism,
        configuration=framework.pairs("-D", define or ()),
        savepoint_path=from_savepoint,
        allow_non_restored_state=allow_non_restored_state,
    )
    filename, content = pack_pipeline(pipeline)
    client = cli.client()
    # The upload is not deleted, as with a run: other users may have uploaded the same program and still need it.
    found = client.plan_pipeline(client.upload_pipeline(filename, content), options)
    if cli.output.as_json:
        cli.output.result(found, "")
    else:
        rows = [(node.description, node.parallelism) for node in reversed(found.plan.nodes)]
        cli.output.table([], ("VERTEX", "PARALLELISM"), rows, empty="no vertices")
        for text in found.explained:
            cli.output.note(text)
        for warning in found.warnings:
            cli.output.note(f"warning: {warning}")
        if found.restore is not None:
            _show_restore(cli, found.restore)
    return ExitCode.FAILED if found.restore is not None and not found.restore.fits else ExitCode.OK


def _show_restore(cli: Cli, restore: RestorePreview) -> None:
    operators = [
        (
            each.uid,
            each.verdict,
            _change(each.restored_parallelism, each.parallelism),
            _change(each.restored_max_parallelism, each.max_parallelism),
        )
        for each in restore.operators
    ]
    cli.output.table([], ("OPERATOR", "STATE IS", "PARALLELISM", "MAX"), operators, empty="no operator has state")
    states = [
        (each.operator, each.state, each.verdict, _change(_fields(each.stored), _fields(each.wanted)))
        for each in restore.states
    ]
    cli.output.table([], ("OPERATOR", "STATE", "VERDICT", "SCHEMA"), states, empty="no keyed state")
    for refusal in restore.refusals:
        cli.output.note(f"refused: {refusal}")
    if restore.fits:
        cli.output.note(f"{restore.snapshot} fits")


def _fields(schema: tuple[str, ...]) -> str | None:
    return ", ".join(schema) or None


def _change(before: object, after: object) -> str:
    """Both values if they differ; a dash stands for a missing one."""
    return str(before) if before == after else f"{_shown(before)} -> {_shown(after)}"


def _shown(value: object) -> str:
    return "-" if value is None else str(value)
