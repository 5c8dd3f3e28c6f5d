"""Reads schemas from a Schema Registry of Confluent's API, by the ids that messages of Kafka carry.

Schemas never change, so that each is asked for once. If the registry does not answer, the call is repeated for a while,
and fails then. Credentials are in no log line and no error.
"""

from __future__ import annotations

import time

import msgspec

from ckpt_runtime.expressions.errors import ServiceError

_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 5, 0.5, 10.0
_MOST_BYTES = 1 << 20
HEADER_BYTES = 5
"""The wire format: a zero byte, the id of the schema as a big-endian number of four bytes, the message."""


class UnknownSchemaError(ValueError):
    """A message does not begin as the wire format says, or the registry has no schema of its id."""


class RegistryError(ServiceError):
    """The registry did not answer, or refused to."""


class _Answer(msgspec.Struct, rename="camel"):
    schema: str
    schema_type: str = "AVRO"
    references: list[msgspec.Raw] = []


class SchemaRegistry:
    """A client of one registry. ``user_info`` is ``user:password`` for basic authentication, or None."""

    def __init__(self, url: str, user_info: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._user_info = user_info
        self._schemas: dict[int, str] = {}

    def schema_of(self, message: bytes) -> str:
        """The schema with which a message was written. Raises UnknownSchemaError, and RegistryError."""
        if len(message) < HEADER_BYTES or message[0]:
            raise UnknownSchemaError("the message does not begin with a zero byte and the id of its schema")
        number = int.from_bytes(message[1:HEADER_BYTES], "big")
        if number not in self._schemas:
            self._schemas[number] = self._asked(number)
        return self._schemas[number]

    def _asked(self, number: int) -> str:
        import httpx

        auth = None
        if self._user_info is not None:
            user, _, password = self._user_info.partition(":")
            auth = httpx.BasicAuth(user, password)
        problem = ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_PAUSE_S * 2**attempt)
            try:
                answer = httpx.get(f"{self._url}/schemas/ids/{number}", auth=auth, timeout=_TIMEOUT_S)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise UnknownSchemaError(f"the Schema Registry has no schema {number}")
            if answer.is_success:
                return self._schema_in(answer.content, number)
            problem = f"status {answer.status_code}"
            if not answer.is_server_error:
                break
        raise RegistryError(f"schema {number} cannot be read from the Schema Registry at {self._url}: {problem}")

    def _schema_in(self, content: bytes, number: int) -> str:
        try:
            found = msgspec.json.decode(content[: _MOST_BYTES + 1], type=_Answer)
        except msgspec.DecodeError as error:
            raise RegistryError(f"the Schema Registry at {self._url} gave no schema for {number}: {error}") from None
        if found.schema_type != "AVRO":
            raise UnknownSchemaError(f"schema {number} of the Schema Registry is of type {found.schema_type}, not AVRO")
        if found.references:
            raise UnknownSchemaError(f"schema {number} of the Schema Registry refers to others, which is not supported")
        return found.schema
