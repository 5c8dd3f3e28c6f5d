"""Reads schemas from a Schema Registry of Confluent's API, by the ids that messages of Kafka carry.

Schemas never change, so that each is asked for once. If the registry does not answer, the call is repeated for a while,
and fails then. Credentials are in no log line and no error.
"""

from __future__ import annotations

import time
from urllib.parse import quote

import msgspec

from ckpt_runtime.expressions.types import ServiceError

_ATTEMPTS, _PAUSE_S, _TIMEOUT_S = 5, 0.5, 10.0
_MOST_BYTES = 1 << 20
HEADER_BYTES = 5
"""The wire format: a zero byte, the id of the schema as a big-endian number of four bytes, the message."""


class UnknownSchemaError(ValueError):
    """A message does not begin as the wire format says, or the registry has no schema of its id."""


class RegistryError(ServiceError):
    """The registry did not answer, or refused to."""


class _Reference(msgspec.Struct):
    subject: str
    version: int


class _Answer(msgspec.Struct, rename="camel"):
    schema: str
    schema_type: str = "AVRO"
    references: list[_Reference] = []


class SchemaRegistry:
    """A client of one registry. ``user_info`` is ``user:password`` for basic authentication, or None."""

    def __init__(self, url: str, user_info: str | None = None) -> None:
        self._url = url.rstrip("/")
        self._user_info = user_info
        self._schemas: dict[int, _Answer] = {}
        self._texts: dict[int, tuple[str, ...]] = {}

    def schema_of(self, message: bytes, kind: str) -> tuple[str, ...]:
        """The schema with which a message was written, behind those that it refers to; ``kind`` is AVRO or PROTOBUF.

        Raises UnknownSchemaError, and RegistryError.
        """
        if len(message) < HEADER_BYTES or message[0]:
            raise UnknownSchemaError("the message does not begin with a zero byte and the id of its schema")
        number = int.from_bytes(message[1:HEADER_BYTES], "big")
        if number not in self._schemas:
            query = "?format=serialized" if kind == "PROTOBUF" else ""
            self._schemas[number] = self._asked(f"schemas/ids/{number}{query}", f"schema {number}")
        found = self._schemas[number]
        if found.schema_type != kind:
            raise UnknownSchemaError(
                f"schema {number} of the Schema Registry is of type {found.schema_type}, not {kind}"
            )
        if number not in self._texts:
            # Messages of Protocol Buffers are read without the schemas that theirs refers to.
            others = self._referred(found, set()) if kind == "AVRO" else []
            self._texts[number] = (*others, found.schema)
        return self._texts[number]

    def _referred(self, answer: _Answer, known: set[tuple[str, int]]) -> list[str]:
        """The schemas that a schema refers to, each behind those to which it refers itself."""
        found: list[str] = []
        for reference in answer.references:
            key = (reference.subject, reference.version)
            if key in known:
                continue
            known.add(key)
            subject, what = quote(reference.subject, safe=""), f"version {reference.version} of {reference.subject!r}"
            other = self._asked(f"subjects/{subject}/versions/{reference.version}", what)
            found += [*self._referred(other, known), other.schema]
        return found

    def _asked(self, path: str, what: str) -> _Answer:
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
                answer = httpx.get(f"{self._url}/{path}", auth=auth, timeout=_TIMEOUT_S)
            except httpx.HTTPError as error:
                problem = f"{type(error).__name__}: {error}"
                continue
            if answer.status_code == httpx.codes.NOT_FOUND:
                raise UnknownSchemaError(f"the Schema Registry has no {what}")
            if answer.is_success:
                return self._schema_in(answer.content, what)
            problem = f"status {answer.status_code}"
            if not answer.is_server_error:
                break
        raise RegistryError(f"{what} cannot be read from the Schema Registry at {self._url}: {problem}")

    def _schema_in(self, content: bytes, what: str) -> _Answer:
        try:
            return msgspec.json.decode(content[: _MOST_BYTES + 1], type=_Answer)
        except msgspec.DecodeError as error:
            raise RegistryError(f"the Schema Registry at {self._url} gave no {what}: {error}") from None
