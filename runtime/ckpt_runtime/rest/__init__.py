"""The HTTP API over the dispatcher: Flink's REST API, FLIP-530, FLIP-571 and this project's additions (docs/rest.md).

A request that is refused has changed nothing; its error is ``{"errors": [...]}`` and names the field, the value and
what is allowed. Nothing is changed before the whole request has arrived. Heads and bodies are bounded in size and time.
Without a token the server listens on loopback only, and refuses foreign hosts and origins. A read never changes
anything, the cookie of a login only reads, and no token is logged or echoed.
"""
