"""The configuration itself: typed reading, older keys, merging, and the checks before anything acts on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_runtime.configuration
from ckpt_runtime.configuration.checkpointing_options import CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import RestOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import (
    InvalidConfigurationError,
    InvalidOptionError,
    OptionScope,
    UnknownOptionError,
)
from ckpt_runtime.configuration.pipeline_options import PipelineOptions
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, JOB_CHECKPOINT_OVERRIDES, OPTIONS
from ckpt_runtime.configuration.state_options import StateOptions
from ckpt_runtime.configuration.validation import find_problems, validate
from tests.support.options_page import render

REPOSITORY = Path(__file__).parents[4]
INTERVAL = CheckpointingOptions.INTERVAL


def test_a_value_is_read_with_its_type_and_a_missing_one_is_the_default() -> None:
    configuration = Configuration({INTERVAL.key: "10 s"})
    assert configuration.get(INTERVAL) == 10_000
    assert configuration.get(CheckpointingOptions.TIMEOUT) == 600_000
    assert configuration.get(CheckpointingOptions.SAVEPOINT_DIRECTORY) is None
    assert INTERVAL in configuration
    assert INTERVAL.key in configuration
    assert CheckpointingOptions.TIMEOUT not in configuration


def test_texts_are_kept_under_the_present_key_and_later_layers_win() -> None:
    assert Configuration({INTERVAL.key: "10000ms"}).to_dict() == {INTERVAL.key: "10000ms"}
    assert Configuration({"state.backend": "rocksdb"}).to_dict() == {"state.backend.type": "rocksdb"}
    both = {"state.backend": "rocksdb", "state.backend.type": "hashmap"}
    assert Configuration(both)["state.backend"] == "hashmap"
    assert Configuration(dict(reversed(both.items())))["state.backend"] == "hashmap"
    lower = Configuration({StateOptions.BACKEND_TYPE.key: "hashmap", "user.key": "1"})
    upper = Configuration({"state.backend": "rocksdb"})
    assert Configuration.merge(lower, upper).to_dict() == {"state.backend.type": "rocksdb", "user.key": "1"}


def test_changes_make_copies() -> None:
    first = Configuration({INTERVAL.key: "1 s", "user.key": "x"})
    second = first.with_values({INTERVAL.key: None, "user.other": "y"})
    assert first.to_dict() == {INTERVAL.key: "1 s", "user.key": "x"}
    assert second.to_dict() == {"user.key": "x", "user.other": "y"}
    assert first.with_option(INTERVAL, 90_000)[INTERVAL.key] == "90 s"
    assert hash(first) == hash(Configuration(first))
    assert first == Configuration(first)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"new": "4", "old": None}, "4"),
        ({"old": "5", "new": "4"}, "4"),
        ({"old": "5", "new": None}, "5"),
        ({"old": "5"}, "5"),
        ({"old": None}, None),
        ({" new ": "6", "old": "5"}, "6"),
        ({" new ": None}, None),
    ],
)
def test_two_spellings_of_an_option_mean_the_same_in_any_order(changes: dict[str, str | None], wanted: str) -> None:
    """A client that moves to the present spelling sets that and removes the older one."""
    names = {"new": "execution.checkpointing.num-retained", "old": "state.checkpoints.num-retained"}
    spelled = [(key.replace(key.strip(), names[key.strip()]), value) for key, value in changes.items()]
    for given in (dict(spelled), dict(reversed(spelled))):
        assert Configuration({names["new"]: "3"}).with_values(given).get_text(names["new"]) == wanted
        if None not in given.values():
            assert (
                Configuration({key: value for key, value in given.items() if value is not None})[names["new"]] == wanted
            )


def test_only_numbers_and_truth_values_are_converted_to_texts() -> None:
    configuration = Configuration.from_values(
        {INTERVAL.key: 1000, "execution.checkpointing.checkpoints-after-tasks-finish": True}
    )
    assert configuration.get(INTERVAL) == 1_000
    assert configuration.get(CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH) is True
    for value in (None, [], {}):
        with pytest.raises(InvalidOptionError, match="a text, a number, true or false"):
            Configuration.from_values({"a": value})


def test_keys_and_values_have_to_be_texts() -> None:
    for values in ({"": "x"}, {1: "x"}, {"a": 1}):
        with pytest.raises(InvalidOptionError):
            Configuration(values)  # type: ignore[arg-type]


def test_properties_of_a_command_line() -> None:
    configuration = Configuration.from_properties(["a=b=c", " execution.checkpointing.interval = 5 s ", "a=d"])
    assert configuration.to_dict() == {"a": "d", INTERVAL.key: "5 s"}
    for item in ("novalue", "=x"):
        with pytest.raises(InvalidOptionError, match="key=value"):
            Configuration.from_properties([item])


def test_secrets_are_not_shown() -> None:
    configuration = Configuration({RestOptions.TOKEN.key: "hush"})
    assert "hush" not in repr(configuration)
    assert configuration.displayed() == {"rest.token": "******"}
    assert configuration.get(RestOptions.TOKEN) == "hush"
    problems = find_problems(configuration, OptionScope.JOB)
    assert len(problems) == 1
    assert "hush" not in str(problems[0])


@pytest.mark.parametrize(
    "key",
    [
        "my.db.password", "MY_DB_PASSWORD", "dbPasswd", "s3.access-key", "s3.accessKey", "s3.secret.key", "x.apiKey",
        "api_key", "fs.azure.account.key.host", "oauth-token", "tokens", "jaas.config", "http.basic-auth", "user.auth",
        "encryption.key", "encryption_key", "aws.credentials", "tls.private_key", "proxy.pwd", "ssl.key.pem",
    ],
)  # fmt: skip
def test_the_values_of_keys_that_speak_of_a_secret_are_not_shown(key: str) -> None:
    configuration = Configuration({key: "hush"})
    assert configuration.displayed() == {key: "******"}
    assert "hush" not in repr(configuration)
    assert configuration.to_dict() == {key: "hush"}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("monkey.business", "1"), ("keyspace", "1"), ("my.keys", "a,b"), ("author", "me"), ("compass", "n"),
        ("rest.token-file", "/path"), ("url", "https://host/path@x"), ("time", "12:30"),
    ],
)  # fmt: skip
def test_other_values_are_shown(key: str, value: str) -> None:
    assert Configuration({key: value}).displayed() == {key: value}


def test_credentials_in_urls_and_misspelt_secrets_are_not_shown() -> None:
    shown = Configuration({"my.url": "jdbc:pg://me:hush@host/db, s3://a:b@c"}).displayed()
    assert shown == {"my.url": "jdbc:pg://******@host/db, s3://******@c"}
    problems = find_problems(Configuration({"rest.my-token": "hush"}), OptionScope.CLUSTER)
    assert "rest.my-token" in str(problems[0])
    assert "hush" not in str(problems[0])


def test_a_misspelt_key_is_refused_with_the_nearest_ones() -> None:
    with pytest.raises(InvalidConfigurationError) as caught:
        validate(Configuration({"execution.checkpointing.intervall": "10 s"}), OptionScope.JOB)
    (problem,) = caught.value.problems
    assert isinstance(problem, UnknownOptionError)
    assert problem.suggestions[0] == INTERVAL.key
    assert f"did you mean {INTERVAL.key}" in str(caught.value)


@pytest.mark.parametrize(
    ("misspelt", "meant"),
    [
        ("exection.checkpointing.interval", "execution.checkpointing.interval"),
        ("sate.backend.type", "state.backend.type"),
        ("pipline.max-parallelism", "pipeline.max-parallelism"),
        ("restart-stategy.type", "restart-strategy.type"),
    ],
)
@pytest.mark.parametrize("scope", OptionScope)
def test_a_key_whose_first_word_is_misspelt_is_refused_with_the_nearest_one(
    misspelt: str, meant: str, scope: OptionScope
) -> None:
    (problem,) = find_problems(Configuration({misspelt: "1"}), scope)
    assert isinstance(problem, UnknownOptionError)
    assert problem.suggestions[0] == meant


@pytest.mark.parametrize(
    "key", ["acme.threshold", "spark.executor.memory", "my-pipeline.name", "job.state.backend.type", "test.port"]
)
def test_keys_with_other_prefixes_belong_to_the_user(key: str) -> None:
    validate(Configuration({key: "x"}), OptionScope.JOB)


def test_all_problems_are_reported_at_once() -> None:
    configuration = Configuration({INTERVAL.key: "x", "state.typo": "1", "parallelism.default": "0"})
    assert [problem.key for problem in find_problems(configuration, OptionScope.JOB)] == [
        INTERVAL.key,
        "state.typo",
        "parallelism.default",
    ]


def test_cluster_options_and_internal_keys_have_no_place_in_a_job() -> None:
    for key, value in (("rest.port", "1"), (JOB_CHECKPOINT_OVERRIDES, "{}")):
        (problem,) = find_problems(Configuration({key: value}), OptionScope.JOB)
        assert problem.key == key
    assert find_problems(Configuration({"rest.port": "1"}), OptionScope.CLUSTER) == ()
    assert Configuration({JOB_CHECKPOINT_OVERRIDES: "{}", "a": "b"}).without(INTERNAL_PREFIX).to_dict() == {"a": "b"}


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"heartbeat.timeout": "1 s"}, "heartbeat.timeout"),
        ({"heartbeat.interval": "3 min", "heartbeat.timeout": "9 min"}, "taskmanager.registration.timeout"),
        ({"pipeline.max-parallelism": "0"}, "pipeline.max-parallelism"),
        ({"pipeline.max-parallelism": "4", "parallelism.default": "5"}, "parallelism.default"),
        (
            {"execution.checkpointing.mode": "AT_LEAST_ONCE", "execution.checkpointing.unaligned.enabled": "true"},
            "execution.checkpointing.unaligned.enabled",
        ),
        ({"execution.checkpointing.continue-in": "/state"}, "execution.checkpointing.checkpoints-after-tasks-finish"),
        (
            {
                "execution.checkpointing.continue-in": "/state",
                "execution.checkpointing.checkpoints-after-tasks-finish": "false",
                "execution.stop-after": "1 min",
            },
            "execution.stop-after",
        ),
        ({"execution.bad-rows.mode": "DEAD_LETTER"}, "execution.bad-rows.mode"),
        (
            {"execution.bad-rows.mode": "DEAD_LETTER", "execution.bad-rows.directory": "bad"},
            "execution.bad-rows.directory",
        ),
        (
            {"restart-strategy.exponential-delay.initial-backoff": "2 min"},
            "restart-strategy.exponential-delay.initial-backoff",
        ),
        ({"high-availability.storageDir": "/ha"}, "high-availability.storageDir"),
        ({"high-availability.type": "filesystem"}, "high-availability.storageDir"),
        ({"high-availability.cluster-id": "../other"}, "high-availability.cluster-id"),
        ({"rest.address": "http://driver"}, "rest.address"),
        ({"rest.address": "dead:8081"}, "rest.address"),
        ({"rest.address": "a b"}, "rest.address"),
        ({"high-availability.zookeeper.quorum": "z"}, "high-availability.zookeeper.quorum"),
    ],
)
def test_options_that_clash_or_are_not_available_are_refused(values: dict[str, str], key: str) -> None:
    (problem,) = find_problems(Configuration(values), OptionScope.CLUSTER)
    assert problem.key == key


@pytest.mark.parametrize("address", ["streams.example.org", "10.0.0.7", "fe80::1", "[::1]"])
def test_names_and_addresses_can_be_advertised(address: str) -> None:
    assert find_problems(Configuration({"rest.address": address}), OptionScope.CLUSTER) == ()


@pytest.mark.row("76.1")
@pytest.mark.parametrize("enabled", ["true", "false"])
def test_the_options_of_unaligned_checkpoints_are_accepted_on_or_off(enabled: str) -> None:
    values = {
        "execution.checkpointing.unaligned.enabled": enabled,
        "execution.checkpointing.aligned-checkpoint-timeout": "30 s",
        "execution.checkpointing.unaligned.max-inflight-data": "64 mb",
        "execution.checkpointing.max-concurrent-checkpoints": "3",
    }
    assert find_problems(Configuration(values), OptionScope.JOB) == ()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("execution.checkpointing.aligned-checkpoint-timeout", "-1 s"),
        ("execution.checkpointing.unaligned.max-inflight-data", "-1 mb"),
        ("execution.checkpointing.unaligned.enabled", "1"),
    ],
)
def test_bad_values_of_unaligned_checkpoints_are_refused_by_name(key: str, value: str) -> None:
    (problem,) = find_problems(Configuration({key: value}), OptionScope.JOB)
    assert (problem.key, problem.value) == (key, value)
    assert problem.allowed


def test_every_option_is_well_formed() -> None:
    keys = [key for option in OPTIONS.values() for key in (option.key, *option.fallback_keys)]
    assert len(keys) == len(set(keys))
    for option in OPTIONS.values():
        assert option.description.endswith(".")
        if option.default_text is not None:
            assert option.parse(option.default_text) == option.default, option.key
    assert find_problems(Configuration({}), OptionScope.CLUSTER) == ()
    assert OPTIONS["parallelism.default"] is PipelineOptions.PARALLELISM


def test_the_reference_of_options_is_up_to_date() -> None:
    page = REPOSITORY / "docs" / "options.md"
    assert page.read_text() == render(), "run: make docs"


def test_the_room_needs_the_standard_library_only_and_no_clock() -> None:
    allowed = {"__future__", "ckpt_runtime", "collections", "dataclasses", "difflib", "enum", "math", "re", "typing"}
    for file in Path(ckpt_runtime.configuration.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            assert {name.split(".")[0] for name in names} <= allowed, file
