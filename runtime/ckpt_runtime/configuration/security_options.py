"""Options under ``security.ssl``: TLS of the REST API, and of the sockets between driver, agents and workers.

Names as in Flink where it has them; certificates and keys are PEM files here. Declarations only.
"""

from __future__ import annotations

from ckpt_runtime.configuration.option import cluster_option
from ckpt_runtime.configuration.value_types import BOOLEAN, NON_EMPTY_STRING


class SecurityOptions:
    """TLS. Off by default."""

    REST_ENABLED = cluster_option(
        "security.ssl.rest.enabled", BOOLEAN, False, "The REST API speaks TLS (1.2 or later) and nothing else."
    )
    REST_CERTIFICATE = cluster_option(
        "security.ssl.rest.certificate",
        NON_EMPTY_STRING,
        None,
        "PEM file with the server's certificate, and those between it and an authority that clients trust. It has to "
        "name the address that clients use.",
    )
    REST_KEY = cluster_option(
        "security.ssl.rest.key-file",
        NON_EMPTY_STRING,
        None,
        "PEM file with the certificate's private key, without a passphrase, readable by the session's user.",
    )
    INTERNAL_ENABLED = cluster_option(
        "security.ssl.internal.enabled",
        BOOLEAN,
        False,
        "Control and data sockets speak TLS 1.3, and both sides show a certificate. The secret of the session has to "
        "be proved all the same.",
    )
    INTERNAL_CERTIFICATE = cluster_option(
        "security.ssl.internal.certificate",
        NON_EMPTY_STRING,
        None,
        "PEM file with the certificate that driver, agents and workers show each other: a path that is there on every "
        "machine of the session.",
    )
    INTERNAL_KEY = cluster_option(
        "security.ssl.internal.key-file",
        NON_EMPTY_STRING,
        None,
        "PEM file with its private key, without a passphrase, on every machine of the session.",
    )
    INTERNAL_AUTHORITY = cluster_option(
        "security.ssl.internal.ca",
        NON_EMPTY_STRING,
        None,
        "PEM file with the authority, of this session or cluster alone, that has signed these certificates; on every "
        "machine of the session. Host names in them are not looked at.",
    )
