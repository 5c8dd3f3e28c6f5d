"""Checks a configuration before anything acts on it: unknown keys, values, places, and options that clash.

An unknown key in one of the system's own namespaces is refused, and the message names the nearest known keys:
otherwise a misspelt option would silently do nothing. A key that nearly equals an option's key is refused as well; in a
job's configuration only if its first word nearly equals the option's, too (``exection.``), since users choose keys of
their own there. One of Spark's keys is refused in a cluster's configuration. Keys with other prefixes belong to the
user and are accepted.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from difflib import get_close_matches

from ckpt_runtime.configuration.checkpointing_options import CheckpointingMode, CheckpointingOptions
from ckpt_runtime.configuration.cluster_options import (
    HeartbeatOptions,
    HighAvailabilityOptions,
    HighAvailabilityType,
    RestOptions,
    SecurityOptions,
    TaskManagerOptions,
)
from ckpt_runtime.configuration.configuration import Configuration, shown_value
from ckpt_runtime.configuration.option import (
    InvalidConfigurationError,
    InvalidOptionError,
    OptionScope,
    UnknownOptionError,
)
from ckpt_runtime.configuration.pipeline_options import (
    BadRowsMode,
    ExecutionOptions,
    PipelineOptions,
    RestartStrategyOptions,
)
from ckpt_runtime.configuration.registry import INTERNAL_PREFIX, NAMESPACES, OPTIONS, find_option

Problem = InvalidOptionError | UnknownOptionError

_NEARLY_THE_SAME = 0.88
"""Minimum difflib similarity for a misspelt option key: one or two letters in twenty may differ."""
_NEARLY_THE_SAME_WORD = 0.86
"""Minimum similarity of the first word of a job's key: one letter of four may be missing, two of nine may differ."""


def validate(configuration: Configuration, scope: OptionScope) -> None:
    """Raises :class:`InvalidConfigurationError` with a list of all problems.

    ``scope`` says whose configuration it is: a job's may hold JOB options only, a cluster's may hold all.
    """
    problems = find_problems(configuration, scope)
    if problems:
        raise InvalidConfigurationError(problems)


def find_problems(configuration: Configuration, scope: OptionScope) -> tuple[Problem, ...]:
    """Finds all problems, in the order of the keys. Finds clashes only if each option alone is valid."""
    problems = [problem for key in configuration if (problem := problem_of(configuration, key, scope))]
    if problems:
        return tuple(problems)
    return tuple(problem for rule in _RULES if (problem := rule(configuration)))


def problem_of(configuration: Configuration, key: str, scope: OptionScope) -> Problem | None:
    """Returns the problem of one key considered alone; None if there is none."""
    value = configuration[key]
    if key.startswith(INTERNAL_PREFIX):
        return InvalidOptionError(
            key, shown_value(key, value), "keys that the system sets itself cannot be given by users"
        )
    option = find_option(key)
    if option is None:
        return _unknown(key, shown_value(key, value), scope)
    try:
        option.parse(value)
    except InvalidOptionError as error:
        return error
    if scope is OptionScope.JOB and option.scope is OptionScope.CLUSTER:
        shown = "***" if option.secret else value
        return InvalidOptionError(key, shown, "only in the cluster's configuration, not in a job's")
    return None


def _unknown(key: str, shown: str, scope: OptionScope) -> Problem | None:
    namespace = key.split(".", 1)[0]
    if namespace in NAMESPACES:
        return UnknownOptionError(key, shown, get_close_matches(key, OPTIONS, n=3, cutoff=0.7))
    known = list(OPTIONS)
    if scope is not OptionScope.CLUSTER:
        words = get_close_matches(namespace, NAMESPACES, cutoff=_NEARLY_THE_SAME_WORD)
        known = [option for option in known if option.split(".", 1)[0] in words]
    elif namespace == "spark":
        return InvalidOptionError(key, shown, "as --conf or in spark_conf, because it is an option of Spark")
    nearest = get_close_matches(key, known, n=3, cutoff=_NEARLY_THE_SAME)
    return UnknownOptionError(key, shown, nearest) if nearest else None


def _max_parallelism_of_zero(configuration: Configuration) -> Problem | None:
    option = PipelineOptions.MAX_PARALLELISM
    if configuration.get(option) == 0:
        return InvalidOptionError(option.key, "0", f"-1, or {option.type.allowed.replace('-1', '1')}")
    return None


def _parallelism_above_maximum(configuration: Configuration) -> Problem | None:
    maximum = configuration.get(PipelineOptions.MAX_PARALLELISM)
    parallelism = configuration.get(PipelineOptions.PARALLELISM)
    if 0 < maximum < parallelism:
        allowed = f"at most {PipelineOptions.MAX_PARALLELISM.key}, which is {maximum}"
        return InvalidOptionError(PipelineOptions.PARALLELISM.key, str(parallelism), allowed)
    return None


def _unaligned_at_least_once(configuration: Configuration) -> Problem | None:
    exactly_once = configuration.get(CheckpointingOptions.MODE) is CheckpointingMode.EXACTLY_ONCE
    if configuration.get(CheckpointingOptions.UNALIGNED) and not exactly_once:
        allowed = f"false with {CheckpointingOptions.MODE.key} AT_LEAST_ONCE, which does not align barriers"
        return InvalidOptionError(CheckpointingOptions.UNALIGNED.key, "true", allowed)
    return None


def _continues_without_finished_tasks(configuration: Configuration) -> Problem | None:
    """The state of a subtask that has finished is in no checkpoint, so a later job could not continue from it."""
    option = CheckpointingOptions.CHECKPOINTS_AFTER_TASKS_FINISH
    if configuration.get(CheckpointingOptions.CONTINUE_IN) is not None and configuration.get(option):
        return InvalidOptionError(option.key, "true", f"false with {CheckpointingOptions.CONTINUE_IN.key}")
    return None


def _continues_without_stop(configuration: Configuration) -> Problem | None:
    """The next run would not find the savepoint with which a job is stopped in time."""
    stop_after = configuration.get(ExecutionOptions.STOP_AFTER)
    if configuration.get(CheckpointingOptions.CONTINUE_IN) is not None and stop_after is not None:
        allowed = f"not together with {CheckpointingOptions.CONTINUE_IN.key}"
        return InvalidOptionError(ExecutionOptions.STOP_AFTER.key, f"{stop_after} ms", allowed)
    return None


def _bad_rows_without_directory(configuration: Configuration) -> Problem | None:
    option, directory = ExecutionOptions.BAD_ROWS_MODE, configuration.get(ExecutionOptions.BAD_ROWS_DIRECTORY)
    if configuration.get(option) is not BadRowsMode.DEAD_LETTER:
        return None
    if directory is None:
        return InvalidOptionError(
            option.key, "DEAD_LETTER", f"DEAD_LETTER with {ExecutionOptions.BAD_ROWS_DIRECTORY.key}"
        )
    if not directory.startswith("/") and "://" not in directory:
        return InvalidOptionError(ExecutionOptions.BAD_ROWS_DIRECTORY.key, directory, "an absolute path or a URL")
    return None


def _heartbeat_timeout_below_interval(configuration: Configuration) -> Problem | None:
    interval = configuration.get(HeartbeatOptions.INTERVAL)
    timeout = configuration.get(HeartbeatOptions.TIMEOUT)
    if timeout <= interval:
        allowed = f"more than {HeartbeatOptions.INTERVAL.key}, which is {interval} ms"
        return InvalidOptionError(HeartbeatOptions.TIMEOUT.key, f"{timeout} ms", allowed)
    return None


def _registration_timeout_below_interval(configuration: Configuration) -> Problem | None:
    """Agents report the progress of starting workers with their heartbeats, so the timeout must exceed the interval."""
    interval = configuration.get(HeartbeatOptions.INTERVAL)
    option = TaskManagerOptions.REGISTRATION_TIMEOUT
    timeout = configuration.get(option)
    if timeout <= interval:
        allowed = f"more than {HeartbeatOptions.INTERVAL.key}, which is {interval} ms"
        return InvalidOptionError(option.key, f"{timeout} ms", allowed)
    return None


def _backoff_above_maximum(configuration: Configuration) -> Problem | None:
    initial = configuration.get(RestartStrategyOptions.EXPONENTIAL_INITIAL_BACKOFF)
    maximum = configuration.get(RestartStrategyOptions.EXPONENTIAL_MAX_BACKOFF)
    if initial > maximum:
        allowed = f"at most {RestartStrategyOptions.EXPONENTIAL_MAX_BACKOFF.key}, which is {maximum} ms"
        return InvalidOptionError(RestartStrategyOptions.EXPONENTIAL_INITIAL_BACKOFF.key, f"{initial} ms", allowed)
    return None


def _high_availability(configuration: Configuration) -> Problem | None:
    kind, directory, name = (
        configuration.get(HighAvailabilityOptions.TYPE),
        configuration.get(HighAvailabilityOptions.STORAGE_DIRECTORY),
        configuration.get(HighAvailabilityOptions.CLUSTER_ID),
    )
    directory_key = HighAvailabilityOptions.STORAGE_DIRECTORY.key
    if kind is HighAvailabilityType.FILESYSTEM and directory is None:
        return InvalidOptionError(directory_key, "", "a directory, since high-availability.type is filesystem")
    if kind is HighAvailabilityType.NONE and directory is not None:
        return InvalidOptionError(directory_key, directory, "together with high-availability.type=filesystem only")
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", name) is None:
        allowed = "at most 100 letters, digits, '.', '_' and '-'; the first one must not be '.' or '-'"
        return InvalidOptionError(HighAvailabilityOptions.CLUSTER_ID.key, name, allowed)
    return None


_HOST = r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f]*:[0-9A-Fa-f]*:[0-9A-Fa-f:.]*\]?"
"""A host name or an address. An IPv6 address has at least two colons; a name with one colon has a port."""


def _rest_address(configuration: Configuration) -> Problem | None:
    address = configuration.get(RestOptions.ADDRESS)
    if address is None or re.fullmatch(_HOST, address):
        return None
    allowed = f"a host name or an address; the port is {RestOptions.PORT.key}"
    return InvalidOptionError(RestOptions.ADDRESS.key, address, allowed)


def _tls(configuration: Configuration) -> Problem | None:
    get, options = configuration.get, SecurityOptions
    rest = (options.REST_CERTIFICATE, options.REST_KEY)
    internal = (options.INTERNAL_CERTIFICATE, options.INTERNAL_KEY, options.INTERNAL_AUTHORITY)
    for enabled, files in ((options.REST_ENABLED, rest), (options.INTERNAL_ENABLED, internal)):
        for option in files:
            path = get(option)
            if get(enabled) and path is None:
                return InvalidOptionError(option.key, "", f"a PEM file, since {enabled.key} is true")
            if not get(enabled) and path is not None:
                return InvalidOptionError(option.key, path, f"together with {enabled.key}=true only")
    return None


_RULES: tuple[Callable[[Configuration], Problem | None], ...] = (
    _max_parallelism_of_zero,
    _parallelism_above_maximum,
    _unaligned_at_least_once,
    _continues_without_finished_tasks,
    _continues_without_stop,
    _bad_rows_without_directory,
    _heartbeat_timeout_below_interval,
    _registration_timeout_below_interval,
    _backoff_above_maximum,
    _high_availability,
    _rest_address,
    _tls,
)
