"""Runs what the documentation shows: pipelines, DAGs, commands, options, links, and the tests that it names."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import string
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.cli.main import app
from ckpt_runtime.configuration.checkpointing_options import MAX_MILLISECONDS, PATCHABLE
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import OptionScope
from ckpt_runtime.configuration.registry import find_option
from ckpt_runtime.configuration.validation import validate
from ckpt_runtime.rest.handlers.configuration import PatchBody, overrides_of
from ckpt_runtime.rest.parameters import checked
from tests.docs.markdown import DOCS, PAGES, ROOT, Block, anchors, blocks, links, spans
from tests.support.run_directory import RUN

PROVIDER = ROOT / "airflow_provider_ckpt"
JOB = "fa461ac280c9aa36bde4a060aa97618c"
ROWS = 600
PYTHON = blocks("python")
# Those that need Spark's analyzer are run by tests/differential/test_documented_programs.py and test_sinks.py.
PROGRAMS = [block for block in PYTHON if "\ndef pipeline(spark" in block.text]
DAGS = [block for block in PYTHON if "with DAG(" in block.text]
OPERATOR_PAGES = ("operators.md", "unaligned-checkpoints.md")
FRAGMENTS = [block for block in PYTHON if block.page.name in OPERATOR_PAGES and block not in DAGS]
# Those that need a Spark session are run by tests/differential/test_state_data_source.py.
IN_SPARK = [block for block in PYTHON if block.page.name == "snapshot-tools.md"]
OTHERS = [block for block in PYTHON if block not in PROGRAMS + DAGS + FRAGMENTS + IN_SPARK]
COMMANDS = [
    (block, line)
    for block in blocks("sh", "bash", "console", "")
    for line in block.text.replace("\\\n", " ").splitlines()
    if re.match(r"(\$ )?ckpt\b", line)
]
COMMAND_SPANS = sorted({(page, span) for page in PAGES for span in spans(page) if re.match(r"ckpt [a-z]", span)})
OPTION_KEY = re.compile(
    r"(execution|state|restart-strategy|parallelism|pipeline|task|taskmanager|web|heartbeat|slot|rest)(\.[a-z0-9-]+)+"
)
NAMED_TEST = re.compile(r"tests/[\w/]+\.py::[\w:]+")


def name_of(value: object) -> str:
    return re.sub(r"[^\w.:-]+", "-", str(value))


# --- Airflow


@pytest.fixture(scope="module")
def airflow_home() -> Path:
    """A home of its own, so that nothing of a person's is read or written."""
    home = Path(os.environ.setdefault("AIRFLOW_HOME", str(RUN.kept("airflow"))))
    os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")
    return home


@pytest.mark.usefixtures("airflow_home")
@pytest.mark.parametrize("block", DAGS, ids=name_of)
def test_a_dag_can_be_stored_by_airflow(block: Block) -> None:
    from airflow.sdk import DAG
    from airflow.serialization.serialized_objects import DagSerialization

    module: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), module)
    dags = [value for value in module.values() if isinstance(value, DAG)]
    assert len(dags) == 1
    document = json.loads(json.dumps(DagSerialization.to_dict(dags[0])))
    assert len(DagSerialization.from_dict(document).task_ids) == len(dags[0].task_ids) > 0


@pytest.mark.long
@pytest.mark.slow
def test_the_types_of_every_dag_are_right(tmp_path: Path) -> None:
    """Strict mypy, as a reader runs it, over all of them at once; it does notice an argument of a wrong type."""
    import mypy.api

    files = sorted((ROOT / "dags").glob("*.py"))
    for number, block in enumerate(DAGS):
        files.append(tmp_path / f"dag_{number}.py")
        files[-1].write_text(block.text)
    readme = next(block.text for block in DAGS if block.page.name == "README.md")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(readme.replace("job=submit.job_id", "job=17"))
    output, errors, _ = mypy.api.run([*map(str, files), str(wrong), "--config-file", str(ROOT / "pyproject.toml")])
    assert errors == ""
    found = [line for line in output.splitlines() if ": error: " in line]
    assert [line for line in found if "/wrong.py:" not in line] == []
    assert len(found) == 2, output
    assert all('has incompatible type "int"; expected "str | XComArg"' in line for line in found)


@cache
def provider_names() -> dict[str, Any]:
    """Every operator and sensor, by its class name."""
    from importlib import import_module

    from airflow.sdk import BaseOperator

    files = [file for folder in ("operators", "sensors") for file in (PROVIDER / folder).glob("[!_]*.py")]
    modules = [import_module(f"airflow_provider_ckpt.{file.parent.name}.{file.stem}") for file in files]
    values = [(name, value) for module in modules for name, value in vars(module).items()]
    return {name: value for name, value in values if isinstance(value, type) and issubclass(value, BaseOperator)}


@pytest.mark.usefixtures("airflow_home")
@pytest.mark.parametrize("block", FRAGMENTS, ids=name_of)
def test_a_fragment_is_accepted_in_a_dag(block: Block) -> None:
    from airflow.sdk import DAG

    names = {"timedelta": timedelta, **provider_names()}
    with DAG(dag_id="fragment", schedule=None) as dag:
        names["submit"] = names["SubmitJobOperator"](task_id="submit_before", pipeline="/opt/pipelines")
        names["start"] = names["StartSessionOperator"](task_id="start_before")
        exec(compile(block.text, str(block), "exec"), names)
    assert len(dag.task_ids) > 2


@pytest.mark.parametrize("block", OTHERS, ids=name_of)
def test_other_python_imports(block: Block) -> None:
    exec(compile(block.text, str(block), "exec"), {})


def test_the_example_of_the_canonical_format_reads_it() -> None:
    (block,) = [block for block in OTHERS if block.page.name == "snapshots.md"]
    namespace: dict[str, Any] = {}
    exec(compile(block.text, str(block), "exec"), namespace)
    savepoint = ROOT / "tests" / "data" / "golden" / "format-2" / "canonical"
    assert namespace["rows_by_state"](str(savepoint))["totals/aggregates"] == 20


# --- the command line


def root_command() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize(("block", "line"), COMMANDS, ids=name_of)
def test_a_command_is_accepted_by_the_command_line(block: Block, line: str) -> None:
    values = {"JOB": JOB}
    words = shlex.split(string.Template(line.removeprefix("$ ")).substitute(values))
    command, name, rest = root_command(), "ckpt", words[1:]
    context = None
    while True:
        context = command.make_context(name, list(rest), parent=context)
        if not hasattr(command, "resolve_command"):
            break
        name, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])
    validate(Configuration.from_properties(context.params.get("define") or ()), OptionScope.CLUSTER)


@pytest.mark.parametrize(("page", "span"), COMMAND_SPANS, ids=name_of)
def test_a_command_in_the_text_names_what_exists(page: Path, span: str) -> None:
    command = root_command()
    known = {text for parameter in command.params for text in parameter.opts + parameter.secondary_opts}
    for word in re.sub(r"[\[\]]", " ", span).replace("|", " ").split()[1:]:
        if hasattr(command, "commands") and not word.startswith("-"):
            if word == "COMMAND":
                return
            assert word in command.commands, f"{page}: there is no command {span!r}"
            command = command.commands[word]
            known |= {text for parameter in command.params for text in parameter.opts + parameter.secondary_opts}
        elif word.startswith("-"):
            assert word in known | {"--help"}, f"{page}: {span!r} has no option {word}"


# --- everything else


@pytest.mark.parametrize("block", blocks("json"), ids=name_of)
def test_json_is_json(block: Block) -> None:
    json.loads(block.text)


PATCHES = [block for block in blocks("json") if block.page.name == "unaligned-checkpoints.md"]


@pytest.mark.row("571.8")
@pytest.mark.parametrize("block", PATCHES, ids=name_of)
def test_a_patch_of_the_settings_is_accepted(block: Block) -> None:
    overrides = overrides_of(checked(PatchBody, json.loads(block.text)))
    assert overrides.applied_to(CheckpointConfiguration()).unaligned_enabled


@pytest.mark.row("571.8")
@pytest.mark.parametrize("name", PATCHABLE)
def test_the_settings_that_can_be_patched_are_documented(name: str) -> None:
    rows = [line.split("|") for line in (DOCS / "rest.md").read_text().splitlines() if line.startswith("| ")]
    (value,) = [cells[2] for cells in rows if f"`{name}`" in cells[1]]
    bounds = PATCHABLE[name].patch_range
    words = {MAX_MILLISECONDS: "ten years", 2**31 - 1: "2^31-1", 2**63 - 1: "2^63-1"}
    assert ("boolean" if bounds is None else f", {bounds[0]} up to {words[bounds[1]]}") in value


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_block_says_what_it_is(page: Path) -> None:
    """A block in another language would be checked by nothing."""
    opened = re.findall(r"^```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert set(opened) <= {"python", "sh", "json", "text", ""}
    assert "" not in opened or page.name == "cli.md"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_have_existing_targets(page: Path) -> None:
    for link in links(page):
        if re.match(r"https?://", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_options_that_are_named_exist(page: Path) -> None:
    named = {span.partition("=")[0] for span in spans(page) if OPTION_KEY.fullmatch(span.partition("=")[0])}
    assert {key for key in named if find_option(key) is None and not key.endswith((".md", ".py"))} == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_make_targets_that_are_named_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"\bmake ([a-z-]+)", "\n".join(spans(page)))) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Paths in code spans: from the root, or from the engine's package; on a page about one folder from that one."""
    package = ROOT / "runtime" / "ckpt_runtime"
    places = [ROOT, ROOT / "runtime", package]
    if page.stem == "simulation":
        places.append(ROOT / "tests" / "simulation")
    if page.parent.name == "rooms":
        places.append(PROVIDER if page.stem == "provider" else package / page.stem)
    shown = {"totals.py", "main.py"}
    named = {span for span in spans(page) if re.fullmatch(r"[\w/]+\.py", span)} - shown
    assert {name for name in named if not any((place / name).exists() for place in places)} == set()


def test_the_map_of_the_engine_names_every_room() -> None:
    package = ROOT / "runtime" / "ckpt_runtime"
    rooms = {room.name for room in package.iterdir() if (room / "__init__.py").exists()}
    table = re.findall(r"^\| \[?(\w+)[\] ]", (ROOT / "runtime" / "README.md").read_text(), re.MULTILINE)
    assert rooms <= set(table)


def test_every_promise_names_tests_that_exist() -> None:
    lines = [line for line in (DOCS / "guarantees.md").read_text().splitlines() if line.startswith("| ")]
    promises = [line for line in lines if not line.startswith(("| promise", "|---"))]
    assert len(promises) > 20
    for line in promises:
        named = NAMED_TEST.findall(line)
        assert named, f"no test is named in {line!r}"
        for name in named:
            assert name in existing_tests(name.partition("::")[0]), f"{name} does not exist"


def test_every_loss_names_tests_that_exist() -> None:
    section = (DOCS / "operations.md").read_text().partition("## What each loss costs")[2].partition("\n## ")[0]
    losses = [line for line in section.splitlines() if line.startswith("| ") and not line.startswith("| lost |")]
    assert len(losses) > 10
    for line in [*losses, section.rpartition("|\n")[2]]:
        named = NAMED_TEST.findall(line)
        assert named, f"no test is named in {line!r}"
        for name in named:
            assert name in existing_tests(name.partition("::")[0]), f"{name} does not exist"


@cache
def existing_tests(file: str) -> set[str]:
    """Tests of a file as pytest names them, without parameters; with state machines of Hypothesis."""
    path = ROOT / file
    if not path.exists():
        return set()
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(f"{file}::{node.name}")
        elif isinstance(node, ast.ClassDef):
            methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
            found |= {f"{file}::{node.name}::{method.name}" for method in methods}
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Attribute) and node.value.attr == "TestCase":
            found |= {f"{file}::{target.id}" for target in node.targets if isinstance(target, ast.Name)}
    return {name for name in found if name.rpartition("::")[2].startswith(("test_", "Test"))}
