"""``ckpt plan``: what a job would run, and how a snapshot fits it, before anything is started or stopped."""

from __future__ import annotations

from ckpt_runtime.cli import values
from ckpt_runtime.cli.exit_codes import ExitCode
from ckpt_runtime.cli.framework import Cli
from ckpt_runtime.cli.run_command import (
    ArgumentsArgument,
    DefineOption,
    EntryOption,
    NonRestoredOption,
    ParallelismOption,
    PipelineArgument,
    SavepointOption,
)
from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.contract.jobs import PlanPreview, RestorePreview, RunOptions


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
        configuration=values.pairs("-D", define or ()),
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
        _show(cli, found)
    return ExitCode.FAILED if found.restore is not None and not found.restore.fits else ExitCode.OK


def _show(cli: Cli, found: PlanPreview) -> None:
    rows = [(node.description, node.parallelism) for node in reversed(found.plan.nodes)]
    cli.output.table([], ("VERTEX", "PARALLELISM"), rows, empty="no vertices")
    for text in found.explained:
        cli.output.note(text)
    for warning in found.warnings:
        cli.output.note(f"warning: {warning}")
    if found.restore is not None:
        _show_restore(cli, found.restore)


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
        (
            each.operator,
            each.state,
            each.verdict,
            _change(_fields(each.stored), _fields(each.wanted)),
        )
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
