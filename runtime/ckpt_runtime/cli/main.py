"""The ``ckpt`` command: assembles the commands and sets the exit code of the process."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from ckpt_runtime.cli import (
    catalogue_commands,
    job_commands,
    job_config_commands,
    session_commands,
    snapshot_commands,
    snapshot_tools,
)
from ckpt_runtime.cli.catalogue_commands import leftovers
from ckpt_runtime.cli.framework import (
    CA_FILE_VARIABLE,
    CLUSTER_ID_VARIABLE,
    HA_DIRECTORY_VARIABLE,
    TOKEN_VARIABLE,
    URL_VARIABLE,
    Settings,
    add_command,
)
from ckpt_runtime.cli.job_commands import events, health, logs, rescale, threads
from ckpt_runtime.cli.job_config_commands import patch_checkpoint_config
from ckpt_runtime.cli.run_command import plan, run
from ckpt_runtime.version import VERSION

app = typer.Typer(
    name="ckpt",
    help="Checkpointed streaming jobs on Spark. Every command also takes --url, --token and --json.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"ckpt {VERSION}")
        raise typer.Exit


@app.callback()
def connection(
    ctx: typer.Context,
    url: Annotated[
        str | None, typer.Option("--url", "-m", envvar=URL_VARIABLE, help="Job manager, host:port or URL.")
    ] = None,
    token: Annotated[
        str | None, typer.Option("--token", envvar=TOKEN_VARIABLE, show_default=False, help="Bearer token.")
    ] = None,
    ca_file: Annotated[
        str | None, typer.Option("--ca-file", envvar=CA_FILE_VARIABLE, help="Certificates to trust.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ha_dir: Annotated[
        str | None,
        typer.Option(
            "--ha-dir", envvar=HA_DIRECTORY_VARIABLE, help="Follow the leader in this high-availability.storageDir."
        ),
    ] = None,
    cluster_id: Annotated[
        str | None,
        typer.Option("--cluster-id", envvar=CLUSTER_ID_VARIABLE, help="Its high-availability.cluster-id there."),
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Checkpointed streaming jobs on Spark."""
    if url and ha_dir and _typed(ctx, "url") != _typed(ctx, "ha_dir"):  # command-line options win over the environment
        url, ha_dir = (url, None) if _typed(ctx, "url") else (None, ha_dir)
    ctx.obj = Settings(
        url or None, token or None, ca_file or None, insecure, as_json, ha_dir or None, cluster_id or None
    )


def _typed(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


session = typer.Typer(help="Start, stop and inspect a session cluster on Spark.", rich_markup_mode=None)
add_command(session, "start", session_commands.start)
add_command(session, "stop", session_commands.stop)
add_command(session, "status", session_commands.status)
app.add_typer(session, name="session")
snapshot = typer.Typer(help="Inspect, verify, copy and convert snapshots, without a session.", rich_markup_mode=None)
add_command(snapshot, "list", catalogue_commands.list_snapshots)
add_command(snapshot, "latest", catalogue_commands.latest)
add_command(snapshot, "show", snapshot_tools.show)
add_command(snapshot, "verify", catalogue_commands.verify)
add_command(snapshot, "copy", snapshot_tools.copy)
add_command(snapshot, "convert", snapshot_tools.convert)
add_command(snapshot, "reposition", snapshot_tools.reposition)
add_command(snapshot, "release", snapshot_tools.release)
app.add_typer(snapshot, name="snapshot")
config = typer.Typer(help="Show and change the configuration of a running job.", rich_markup_mode=None)
add_command(config, "get", job_config_commands.get)
add_command(config, "set", job_config_commands.set_options)
add_command(config, "unset", job_config_commands.unset)
add_command(config, "edit", job_config_commands.edit)
app.add_typer(config, name="config")
program = typer.Typer(help="Uploaded programs, and who holds them.", rich_markup_mode=None)
add_command(program, "list", job_commands.list_programs)
add_command(program, "hold", job_commands.hold_program)
add_command(program, "release", job_commands.release_program)
app.add_typer(program, name="program")
lineage = typer.Typer(help="Upgrades in progress.", rich_markup_mode=None)
add_command(lineage, "release", job_commands.release_lineage)
app.add_typer(lineage, name="lineage")
# Arguments after the pipeline are passed to the pipeline.
add_command(app, "run", run, context_settings={"allow_interspersed_args": False})
add_command(app, "plan", plan, context_settings={"allow_interspersed_args": False})
add_command(app, "list", job_commands.list_jobs)
add_command(app, "info", job_commands.info)
add_command(app, "health", health)
add_command(app, "threads", threads)
add_command(app, "logs", logs)
add_command(app, "events", events)
add_command(app, "cancel", job_commands.cancel)
add_command(app, "savepoint", snapshot_commands.savepoint)
add_command(app, "stop", snapshot_commands.stop)
add_command(app, "checkpoint", snapshot_commands.checkpoint)
add_command(app, "patch-checkpoint-config", patch_checkpoint_config)
add_command(app, "rescale", rescale)
add_command(app, "leftovers", leftovers)


@cache
def _command() -> Callable[..., Any]:
    """The command with all others below it; Typer would make it again for each call of the application."""
    return typer.main.get_command(app)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (``ckpt_runtime.cli.framework``)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        _command()(args=None if argv is None else list(argv), prog_name="ckpt")
        sys.stdout.flush()
    except SystemExit as end:
        return _flushed(end.code if isinstance(end.code, int) else 0)
    except BrokenPipeError:
        return _flushed(1)
    return 0


def _flushed(code: int) -> int:
    """Flush the output and return the code; a closed pipe (``ckpt list | head``) must not cause a traceback at exit."""
    try:
        sys.stdout.flush()
    except (BrokenPipeError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, 1)
        os.close(descriptor)
        return code or 1
    return code


def entry_point() -> None:
    """The entry point of the console script."""
    sys.exit(main())
