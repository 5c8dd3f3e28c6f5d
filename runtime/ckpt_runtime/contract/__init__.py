"""The REST contract: every answer as one msgspec struct, in Flink's shapes plus this project's own fields.

The engine fills the structs, the server encodes them, the client decodes them, and the OpenAPI document is generated
from them. The package imports nothing of the engine, so that the client imports in milliseconds.

Times are milliseconds since the epoch (-1: not yet), durations are milliseconds, sizes are bytes, states have Flink's
names in upper case. Readers ignore unknown fields, and accept Flink's own answers: what Flink lacks has a default.
"""
