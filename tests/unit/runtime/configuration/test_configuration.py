"""The configuration: typed values, older keys, merging, and the checks before anything acts on it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import ckpt_runtime.configuration
from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import RestOptions
from ckpt_runtime.configuration.configuration import Configuration
from ckpt_runtime.configuration.option import (
    InvalidConfigurationError,
    InvalidOptionError,
    OptionScope,
    UnknownOptionError,
    format_duration,
    format_memory_size,
    parse_duration,
    parse_memory_size,
)
from ckpt_runtime.configuration.pipeline_options import PipelineOptions, RestartStrategyOptions, RestartStrategyType
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, JOB_CHECKPOINT_OVERRIDES, OPTIONS
from ckpt_runtime.configuration.state_options import StateBackendType, StateOptions
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


@pytest.mark.parametrize(
    ("text", "millis"),
    [
        ("10 s", 10_000),
        ("10s", 10_000),
        ("10000ms", 10_000),
        ("10000", 10_000),
        (" 1 MIN ", 60_000),
        ("1m", 60_000),
        ("2 hours", 7_200_000),
        ("1 day", 86_400_000),
        ("1500000 us", 1_500),
        ("0", 0),
        ("PT10S", 10_000),
        (" p1dt2h3m4.5s ", 93_784_500),
        ("P2D", 172_800_000),
        ("PT0,25S", 250),
        ("PT1.S", 1_000),
        ("PT90M", 5_400_000),
    ],
)
def test_durations_are_whole_milliseconds(text: str, millis: int) -> None:
    assert parse_duration(text) == millis


@pytest.mark.parametrize(
    "text",
    [
        *("", "s", "-1 s", "1.5 s", "1e3", "10 x", "1 s 2 ms", "١ s", "1 ns", "9" * 30, "1\ns", "+1s"),
        *("P", "PT", "P1DT", "PT1", "P1Y", "P1W", "PT-1S", "-PT1S", "PT1S1M", "PT1.5M", "PT.5S", "PT0.0001S"),
        *("P" + "9" * 18 + "D", "PT" + "9" * 30 + "S", "PT1 S", "PT١S"),
    ],
)
def test_other_texts_are_no_durations(text: str) -> None:
    with pytest.raises(ValueError, match="a number with a unit"):
        parse_duration(text)


@pytest.mark.parametrize(("text", "size"), [("64 kb", 65_536), ("1g", 1 << 30), ("20", 20), ("3 MB", 3 << 20)])
def test_memory_sizes_are_bytes_in_powers_of_1024(text: str, size: int) -> None:
    assert parse_memory_size(text) == size


@pytest.mark.parametrize("text", ["", "1 kib", "-1", "1.5g", "99999999999 tb", "0x10"])
def test_other_texts_are_no_memory_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="a number with a unit"):
        parse_memory_size(text)


def test_canonical_texts_use_the_largest_unit_that_fits() -> None:
    assert [format_duration(value) for value in (0, 999, 10_000, 60_000, 90_000)] == [
        "0 ms",
        "999 ms",
        "10 s",
        "1 min",
        "90 s",
    ]
    assert [format_memory_size(value) for value in (0, 1_000, 65_536)] == ["0 bytes", "1000 bytes", "64 kb"]


@pytest.mark.row("530.2")
def test_an_unusable_value_names_the_option_the_value_and_what_is_allowed() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        CheckpointingOptions.TIMEOUT.parse("soon")
    assert caught.value.key == "execution.checkpointing.timeout"
    assert caught.value.value == "soon"
    assert "at least 10 ms" in caught.value.allowed
    assert str(caught.value).startswith("execution.checkpointing.timeout: 'soon'")


def test_a_value_below_the_least_checkpoint_time_is_refused() -> None:
    for option in (CheckpointingOptions.INTERVAL, CheckpointingOptions.TIMEOUT):
        assert option.parse("10 ms") == 10
        with pytest.raises(InvalidOptionError, match="at least 10 ms"):
            option.parse("9 ms")


def test_enums_are_read_in_any_spelling_and_list_their_values_otherwise() -> None:
    assert CheckpointingOptions.MODE.parse("exactly-once") is CheckpointingMode.EXACTLY_ONCE
    assert RestartStrategyOptions.TYPE.parse("fixeddelay") is RestartStrategyType.FIXED_DELAY
    assert RestartStrategyOptions.TYPE.parse("off") is RestartStrategyType.NONE
    assert StateOptions.BACKEND_TYPE.parse("RocksDB") is StateBackendType.ROCKSDB
    with pytest.raises(InvalidOptionError, match="allowed: hashmap, rocksdb"):
        StateOptions.BACKEND_TYPE.parse("heap")


@pytest.mark.parametrize("text", ["yes", "1", "", "truee"])
def test_booleans_are_true_or_false(text: str) -> None:
    assert CheckpointingOptions.UNALIGNED.parse(" TRUE ") is True
    assert CheckpointingOptions.UNALIGNED.parse("false") is False
    with pytest.raises(InvalidOptionError, match="true, false"):
        CheckpointingOptions.UNALIGNED.parse(text)


@pytest.mark.parametrize("text", ["0", "1.0", "1e3", "", "2147483648", "٣", "--1", "1_000", "9" * 5_000])
def test_integers_are_plain_and_in_range(text: str) -> None:
    assert CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS.parse(" 3 ") == 3
    with pytest.raises(InvalidOptionError, match="a whole number from 1 to 2147483647"):
        CheckpointingOptions.MAX_CONCURRENT_CHECKPOINTS.parse(text)


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "1e400", "0.5", "x"])
def test_numbers_are_finite_and_in_range(text: str) -> None:
    assert RestartStrategyOptions.EXPONENTIAL_MULTIPLIER.parse("1.5") == 1.5
    with pytest.raises(InvalidOptionError, match="a number from 1 to 1000"):
        RestartStrategyOptions.EXPONENTIAL_MULTIPLIER.parse(text)


def test_an_error_never_shows_a_secret() -> None:
    with pytest.raises(InvalidOptionError) as caught:
        RestOptions.TOKEN.parse(" ")
    assert caught.value.value == "***"


@pytest.mark.parametrize(
    "labels",
    [{}, {"team": "payments"}, {"a b": "x:y, z", "quote": "it's", "empty": "", " padded ": 'say "no"', "comma": ","}],
)
def test_maps_are_read_as_they_are_printed(labels: dict[str, str]) -> None:
    option = PipelineOptions.GLOBAL_JOB_PARAMETERS
    assert option.parse(option.format(labels)) == labels


def test_maps_are_pairs_in_quotes_where_needed() -> None:
    found = PipelineOptions.GLOBAL_JOB_PARAMETERS.parse(""" team : payments, 'url':"https://h:1",'it''s':x """)
    assert found == {"team": "payments", "url": "https://h:1", "it's": "x"}


@pytest.mark.parametrize("text", ["a", "a:b:c", ":x", "a:'b", "a:b,a:c", ",", "a:b'c", "''"])
def test_other_texts_are_no_maps(text: str) -> None:
    with pytest.raises(InvalidOptionError, match=r"pipeline.global-job-parameters.*pairs such as"):
        PipelineOptions.GLOBAL_JOB_PARAMETERS.parse(text)
