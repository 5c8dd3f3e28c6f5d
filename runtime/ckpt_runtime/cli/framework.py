"""Makes commands from functions that get a :class:`Cli`; every command takes the options of the connection.

Expected failures become one line on standard error and an exit code; only a defect shows a traceback.

Scripts may rely on the exit codes (docs/cli.md).

The session file describes the session that was started last, so that later commands find it. It holds a token and the
processes to stop, so it is private to its owner and refused if it is not. All other files of the session lie beside it,
so that two sessions of one user never share a file.

Values that users type are parsed here: job ids, durations, sizes, ``key=value`` pairs. A usage error names the option.
"""

from __future__ import annotations

import inspect
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import msgspec
import typer

from ckpt_runtime.cli.output import CommandOutput
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.errors import (
    BadRequest,
    CkptApiError,
    CkptClientError,
    Conflict,
    JobEnded,
    NotFound,
    OperationFailed,
    Unauthorized,
    Unreachable,
    WaitTimeout,
)
from ckpt_runtime.client.private_files import write_private
from ckpt_runtime.client.transport import LeaderSource, LeaderUnproven
from ckpt_runtime.client.waiting import DEFAULT_RETRY_TIMEOUT_S, POLL_PATIENCE_S
from ckpt_runtime.configuration.option import parse_duration, parse_memory_size
from ckpt_runtime.spark.launch import SessionInfo

_HEX_ID = re.compile(r"[0-9a-fA-F]{32}")


def job_id(text: str) -> str:
    """Parse a job id: 32 hex digits, in lower case."""
    if not _HEX_ID.fullmatch(text):
        raise typer.BadParameter(f"{text!r} is not a job id, it must be 32 hexadecimal digits")
    return text.lower()


def optional_job_id(text: str | None) -> str | None:
    """:func:`job_id` of the text; None if not given."""
    return None if text is None else job_id(text)


def job_ids(texts: list[str] | None) -> list[str] | None:
    """:func:`job_id` of each text; None if not given."""
    return None if texts is None else [job_id(text) for text in texts]


def duration_ms(option: str, text: str | None) -> int | None:
    """Milliseconds of ``10 s``, ``5min``, ...; None if not given.

    A bare number is refused as ambiguous: options count milliseconds, as Flink's do, but users may mean seconds.
    """
    if text is None:
        return None
    number = text.strip()
    if number.isdecimal() and int(number) > 0:
        raise typer.BadParameter(f'{option}: {text!r} has no unit, write "{number} s", "{number} ms" or "{number} min"')
    return _parsed(option, text, parse_duration)


def size_bytes(option: str, text: str | None) -> int | None:
    """Bytes of ``64 mb``, ...; None if not given."""
    return None if text is None else _parsed(option, text, parse_memory_size)


def _parsed(option: str, text: str, parse: Callable[[str], int]) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be {error}") from None


def timeout_s(option: str, text: str | None) -> float | None:
    """Seconds of a duration; None if not given, which means no time limit."""
    millis = duration_ms(option, text)
    return None if millis is None else millis / 1000


def pairs(option: str, texts: Iterable[str]) -> dict[str, str]:
    """Parse ``key=value``, given any number of times; a repeated key must have the same value.

    ``@FILE`` stands for the lines of a file, so that a secret need not be in the process list.
    """
    found: dict[str, str] = {}
    for text in _with_files(option, texts):
        key, separator, value = text.partition("=")
        key, value = key.strip(), value.strip()
        if not separator or not key:
            raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be key=value")
        if found.setdefault(key, value) != value:
            raise typer.BadParameter(f"{option}: {key} is given twice with different values")
    return found


def parallelism(option: str, text: str) -> tuple[str | None, int]:
    """Parse ``N`` or ``VERTEX=N``."""
    vertex, separator, number = text.rpartition("=")
    if not number.strip().isdecimal() or (separator and not vertex.strip()):
        raise typer.BadParameter(f"{option}: {text!r} is not acceptable, it must be N or VERTEX=N")
    return (vertex.strip() if separator else None), int(number)


def _with_files(option: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        if not text.startswith("@"):
            yield text
            continue
        try:
            lines = Path(text[1:]).read_text().splitlines()
        except (OSError, UnicodeError) as error:
            raise typer.BadParameter(
                f"{option}: {text!r} is not acceptable, the file cannot be read: {error}"
            ) from None
        yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


PATH_VARIABLE = "CKPT_SESSION_FILE"
_MAX_BYTES = 64 * 1024


def session_path() -> Path:
    """``$CKPT_SESSION_FILE``, or ``ckpt/session.json`` in ``$XDG_STATE_HOME`` or ``~/.local/state``."""
    if given := os.environ.get(PATH_VARIABLE):
        return Path(given)
    base = os.environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "ckpt" / "session.json"


def read_session(path: Path) -> SessionInfo | None:
    """The session in the file; None without a file. Raises :class:`CommandError` for a file that cannot be trusted."""
    try:
        with path.open("rb") as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.getuid() or info.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise CommandError(f"{path} is not private to you; remove it or chmod 600 it", ExitCode.USAGE)
            return msgspec.json.decode(file.read(_MAX_BYTES), type=SessionInfo)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise CommandError(f"{path} is not a session file: {error}", ExitCode.USAGE) from error


def write_session(path: Path, info: SessionInfo) -> None:
    """Write the file atomically, readable only by its owner."""
    write_private(path, msgspec.json.encode(info))


def path_beside(path: Path, suffix: str) -> Path:
    """The path of another file of the session, such as its log or default working directory, beside ``path``."""
    return path.with_name((path.stem if path.suffix == ".json" else path.name) + suffix)


class ExitCode(IntEnum):
    """The exit codes, which are never renumbered."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    NOT_FOUND = 4
    CONFLICT = 5
    UNAUTHORIZED = 6
    TIMEOUT = 7
    SERVER_ERROR = 8
    INTERRUPTED = 130
    TERMINATED = 143


class CommandError(Exception):
    """An expected failure of a command: one line for the user, and its exit code."""

    def __init__(self, message: str, code: ExitCode) -> None:
        super().__init__(message)
        self.code = code


_CODES: tuple[tuple[type[CkptClientError], ExitCode], ...] = (
    (Unreachable, ExitCode.UNREACHABLE),
    (NotFound, ExitCode.NOT_FOUND),
    (Conflict, ExitCode.CONFLICT),
    (Unauthorized, ExitCode.UNAUTHORIZED),
    (LeaderUnproven, ExitCode.UNAUTHORIZED),
    (BadRequest, ExitCode.USAGE),
    (CkptApiError, ExitCode.SERVER_ERROR),
    (OperationFailed, ExitCode.FAILED),
    (JobEnded, ExitCode.FAILED),
    (WaitTimeout, ExitCode.TIMEOUT),
)


def code_of(error: Exception) -> ExitCode:
    """The exit code of an expected failure; client errors without a code of their own are due to the user's input."""
    if isinstance(error, CommandError):
        return error.code
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.USAGE)


URL_VARIABLE = "CKPT_REST_URL"
TOKEN_VARIABLE = "CKPT_REST_TOKEN"
CA_FILE_VARIABLE = "CKPT_CA_FILE"
HA_DIRECTORY_VARIABLE = "CKPT_HA_DIR"
CLUSTER_ID_VARIABLE = "CKPT_CLUSTER_ID"


@dataclass(frozen=True, slots=True)
class Settings:
    """The connection's options as given; None or False if they were not given.

    ``url`` and ``ha_dir`` are alternatives; giving both at once is refused.
    """

    url: str | None = None
    token: str | None = None
    ca_file: str | None = None
    insecure: bool = False
    as_json: bool = False
    ha_dir: str | None = None
    cluster_id: str | None = None

    def over(self, outer: Settings) -> Settings:
        """These options; those that are not given are taken from the ``outer`` ones."""
        given = {name: getattr(self, name) for name in _NAMES if getattr(self, name)}
        if self.url or self.ha_dir:
            outer = replace(outer, url=None, ha_dir=None)
        return replace(outer, **given)


_NAMES = tuple(field.name for field in fields(Settings))


@dataclass
class Cli:
    """The context of a command: its settings, its output and the client."""

    settings: Settings
    output: CommandOutput
    _client: CkptClient | None = field(default=None, init=False)
    _shown: set[str] = field(default_factory=set, init=False)

    def client(self) -> CkptClient:
        """The client for the chosen job manager, made on first use."""
        if self._client is None:
            address, token = self.address()
            verify: bool | str = not self.settings.insecure
            if self.settings.ca_file is not None and not self.settings.insecure:
                verify = self.settings.ca_file
            try:
                follows = not isinstance(address, str)
                self._client = CkptClient(
                    address,
                    token=token,
                    verify=verify,
                    retry_timeout_s=POLL_PATIENCE_S if follows else DEFAULT_RETRY_TIMEOUT_S,
                    on_away=self._tell_away if follows else None,
                )
            except OSError as error:
                raise CommandError(f"--ca-file: {self.settings.ca_file}: {error}", ExitCode.USAGE) from error
        return self._client

    @property
    def is_given(self) -> bool:
        """Whether the job manager was given, by its address or by its high-availability directory."""
        return self.settings.url is not None or self.settings.ha_dir is not None

    def _tell_away(self, error: CkptClientError) -> None:
        """Report that the server does not serve: once for each reason, since a takeover takes some seconds."""
        if str(error) not in self._shown:
            self._shown.add(str(error))
            self.output.note(f"{error}; looking for the leader")

    def session(self) -> SessionInfo | None:
        """The last started session, if any."""
        return read_session(session_path())

    def address(self) -> tuple[str | LeaderSource, str | None]:
        """The job manager's address and the token. A session's token is sent to that session only."""
        url, token = self.settings.url, self.settings.token
        if self.settings.ha_dir is not None:
            if url is not None:
                raise CommandError("--url and --ha-dir: only one of them can be given", ExitCode.USAGE)
            return self._leader(self.settings.ha_dir)
        session = self.session() if url is None or token is None else None
        if url is None:
            if session is None:
                raise CommandError(
                    f"no job manager: give --url or --ha-dir, set {URL_VARIABLE}, "
                    "or start one with 'ckpt session start'",
                    ExitCode.USAGE,
                )
            url = session.rest_url
        if token is None and session is not None and session.rest_url == url:
            token = session.token
        return url, token

    def _leader(self, directory: str) -> tuple[LeaderSource, str | None]:
        """The source of the leader, and the token; by default that of the last started session.

        That is safe because a token is sent only to a leader that has the same token.
        """
        from ckpt_runtime.leader_retrieval import DEFAULT_CLUSTER_ID, InvalidLeaderDirectory, LeaderDirectory

        token = self.settings.token
        if token is None:
            session = self.session()
            token = None if session is None else session.token
        try:
            cluster_id = self.settings.cluster_id or DEFAULT_CLUSTER_ID
            return LeaderDirectory(directory, cluster_id, token=token), token
        except InvalidLeaderDirectory as error:
            raise CommandError(f"--ha-dir: {error}", ExitCode.USAGE) from error

    def close(self) -> None:
        """Close the client's connections."""
        if self._client is not None:
            self._client.close()


def _connection_options(
    url: Annotated[str | None, typer.Option("--url", "-m", help="Job manager, host:port or URL.")] = None,
    token: Annotated[str | None, typer.Option("--token", help=f"Bearer token; better in {TOKEN_VARIABLE}.")] = None,
    ca_file: Annotated[str | None, typer.Option("--ca-file", help="Certificates to trust.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Do not check the server's certificate.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    ha_dir: Annotated[
        str | None, typer.Option("--ha-dir", help="Follow the leader in this high-availability.storageDir.")
    ] = None,
    cluster_id: Annotated[
        str | None, typer.Option("--cluster-id", help="Its high-availability.cluster-id there.")
    ] = None,
) -> None:
    """Never called: its parameters are added to every command."""


def _parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(function, include_extras=True)
    parameters = inspect.signature(function).parameters.values()
    return [
        parameter.replace(annotation=hints[parameter.name], kind=inspect.Parameter.KEYWORD_ONLY)
        for parameter in parameters
    ]


def add_command(app: typer.Typer, name: str, function: Callable[..., ExitCode | None], **options: Any) -> None:
    """Make a command from a function ``(cli, ...)``, which may return its exit code."""

    @wraps(function)
    def invoke(ctx: typer.Context, **arguments: Any) -> None:
        given = Settings(**{option: arguments.pop(option) for option in _NAMES})
        outer = ctx.find_root().obj or Settings()
        raise typer.Exit(_run(function, given.over(outer), arguments))

    context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    parameters = [context, *_parameters_of(function)[1:], *_parameters_of(_connection_options)]
    invoke.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    invoke.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    app.command(name, **options)(invoke)


def _run(function: Callable[..., ExitCode | None], settings: Settings, arguments: dict[str, Any]) -> int:
    cli = Cli(settings, CommandOutput(as_json=settings.as_json))
    try:
        return int(function(cli, **arguments) or ExitCode.OK)
    except (CommandError, CkptClientError) as error:
        code = code_of(error)
        cli.output.error(str(error), code)
        return int(code)
    except KeyboardInterrupt:
        cli.output.error("interrupted", ExitCode.INTERRUPTED)
        return int(ExitCode.INTERRUPTED)
    finally:
        cli.close()
