"""Options of the session cluster: slots, REST, logs, high availability, TLS, Spark Connect. Declarations only.

Names are those of Flink where it has them. Certificates and keys are PEM files here.
"""

from __future__ import annotations

from enum import StrEnum

from ckpt_runtime.configuration.option import (
    BOOLEAN,
    DURATION,
    KEYS,
    NON_EMPTY_STRING,
    ConfigOption,
    DurationType,
    EnumType,
    IntegerType,
    MemorySizeType,
    cluster_option,
)

_MOST_PORTS = 10_000
_LAST_FIRST_PORT = 65_536 - _MOST_PORTS
"""The highest first port: with the highest allowed number of ports, the last port is still a valid one."""


class CpuPinning(StrEnum):
    """Whether worker processes are bound to processor cores."""

    AUTO = "auto"
    OFF = "off"


class HeartbeatOptions:
    """Heartbeats between the driver and the slots."""

    INTERVAL = cluster_option("heartbeat.interval", DurationType(10), 1_000, "Time between two heartbeats.")
    TIMEOUT = cluster_option(
        "heartbeat.timeout", DurationType(20), 10_000, "A peer without a heartbeat for this long counts as lost."
    )


class SlotOptions:
    """The slot pool."""

    IDLE_TIMEOUT = cluster_option(
        "slot.idle.timeout", DURATION, 50_000, "A slot that no job uses is given back to Spark after this time."
    )
    REQUEST_TIMEOUT = cluster_option(
        "slot.request.timeout",
        DurationType(1),
        300_000,
        "A job whose slots are not available after this time fails; until then it shows why it waits.",
    )
    RESERVATION_INTERVAL = cluster_option(
        "slot.request.reservation-interval",
        DURATION,
        60_000,
        "Other jobs may start before a job that needs more slots than are free for this long; then free slots are "
        "reserved for it for as long, and so on in turn. A request that times out and is repeated keeps its turn. 0 "
        "ms reserves nothing: a stream of small jobs may delay a large one indefinitely.",
    )


class TaskManagerOptions:
    """Workers and the exchange of data between them. A job may override what concerns its own channels."""

    REGISTRATION_TIMEOUT = cluster_option(
        "taskmanager.registration.timeout",
        DurationType(10_000),
        120_000,
        "A worker process that has not registered yet is killed if it has used no processor time for this long.",
    )
    DATA_PORT = cluster_option(
        "taskmanager.data.port",
        IntegerType(minimum=0, maximum=_LAST_FIRST_PORT),
        0,
        "The first of the ports at which workers listen for each other, on every host; 0 takes any free ones.",
    )
    DATA_PORT_COUNT = cluster_option(
        "taskmanager.data.port-count",
        IntegerType(minimum=1, maximum=_MOST_PORTS),
        100,
        "Number of ports from `taskmanager.data.port` on. A host needs three for each of its slots: for the worker, "
        "its spare, and one that ends. All sessions that use a host share them.",
    )
    CPU_PINNING = cluster_option(
        "taskmanager.cpu-pinning",
        EnumType(CpuPinning),
        CpuPinning.AUTO,
        "auto binds each worker process to its own core if the host has no more workers, of all jobs, than cores.",
    )
    BUFFER_ROWS = ConfigOption(
        "taskmanager.network.buffer.max-rows",
        IntegerType(minimum=1, maximum=1 << 24),
        32_768,
        "Maximum rows of a buffer. Fewer rows cost throughput, more rows cost latency.",
    )
    BUFFER_BYTES = ConfigOption(
        "taskmanager.network.buffer.max-bytes",
        MemorySizeType(minimum=1 << 10, maximum=1 << 30),
        1 << 19,
        "Maximum bytes of a buffer; a larger row gets its own buffer. Rows of a batch for a subtask in the same worker "
        "are passed on together, up to 16 times as many bytes.",
    )
    BUFFERS_PER_CHANNEL = ConfigOption(
        "taskmanager.network.memory.buffers-per-channel",
        IntegerType(minimum=1, maximum=1 << 16),
        2,
        "Buffers that a receiver accepts from each channel before it has processed any (credits).",
    )
    MAX_BUFFERS_PER_OUTPUT_CHANNEL = ConfigOption(
        "taskmanager.network.memory.max-buffers-per-channel",
        IntegerType(minimum=1, maximum=1 << 16),
        1,
        "Maximum number of buffers that a sender queues for one channel before it is back-pressured.",
    )
    BUFFER_DEBLOAT_ENABLED = ConfigOption(
        "taskmanager.network.memory.buffer-debloat.enabled",
        BOOLEAN,
        False,
        "Makes buffers smaller where rows are processed slowly, so that barriers do not wait long behind them.",
    )
    BUFFER_DEBLOAT_TARGET = ConfigOption(
        "taskmanager.network.memory.buffer-debloat.target",
        DurationType(1),
        1_000,
        "With debloating: the time in which a subtask should process all data on its way to it.",
    )
    BUFFER_DEBLOAT_PERIOD = ConfigOption(
        "taskmanager.network.memory.buffer-debloat.period",
        DurationType(1),
        200,
        "With debloating: time between two measurements of a subtask's throughput.",
    )
    BUFFER_DEBLOAT_SAMPLES = ConfigOption(
        "taskmanager.network.memory.buffer-debloat.samples",
        IntegerType(minimum=1, maximum=10_000),
        20,
        "With debloating: number of measurements over which the size is smoothed. Fewer react faster, more smooth "
        "out bursts.",
    )
    BUFFER_DEBLOAT_THRESHOLD_PERCENTAGES = ConfigOption(
        "taskmanager.network.memory.buffer-debloat.threshold-percentages",
        IntegerType(minimum=0, maximum=100),
        25,
        "With debloating: minimum difference between a new size and the current one for it to be sent to senders.",
    )


class JobManagerOptions:
    """The dispatcher and its job masters."""

    RPC_PORT = cluster_option(
        "jobmanager.rpc.port",
        IntegerType(minimum=0, maximum=65_535),
        0,
        "The port at which the driver listens for slots and workers; 0 takes any free one.",
    )

    DYNAMIC_CONFIGURATION_ALLOW_LIST: ConfigOption[tuple[str, ...]] = cluster_option(
        "jobmanager.execution.dynamic-configuration.allow-list",
        KEYS,
        ("execution.checkpointing.interval", "pipeline.source.rates"),
        "Options of running jobs that may be changed by `/jobs/:jobid/config` (FLIP-530), separated by commas; `*` "
        "allows all of them, and an empty value none.",
    )

    CHECKPOINT_HISTORY_SIZE = cluster_option(
        "web.checkpoints.history",
        IntegerType(minimum=0, maximum=100_000),
        10,
        "Number of checkpoints in a job's history.",
    )
    EXCEPTION_HISTORY_SIZE = cluster_option(
        "web.exception-history-size",
        IntegerType(minimum=1, maximum=10_000),
        16,
        "Number of failures in a job's exception history.",
    )
    STORAGE_TIMEOUT = cluster_option(
        "jobmanager.storage.timeout",
        DurationType(1),
        60_000,
        "How long the driver waits for one call to storage, including the time that the call waits for a thread; a "
        "checkpoint or request whose call takes longer fails. Each host or bucket has its own threads. Deletions "
        "may take ten times as long.",
    )
    PLANNING_TIMEOUT = cluster_option(
        "jobmanager.planning.timeout",
        DurationType(1),
        120_000,
        "Maximum time, and maximum processor time, of the process that runs a pipeline function.",
    )
    PLANNING_MEMORY = cluster_option(
        "jobmanager.planning.memory",
        MemorySizeType(minimum=64 << 20, maximum=1 << 40),
        2 << 30,
        "Memory (address space) that the process which runs a pipeline function may use in addition to the engine's "
        "modules.",
    )
    STATIC_TABLES_SIZE = cluster_option(
        "jobmanager.planning.static-tables.max-size",
        MemorySizeType(minimum=1, maximum=128 << 20),
        64 << 20,
        "Maximum size in memory of all static tables that a PySpark program joins with streams. The driver keeps "
        "them, compressed, as long as the job runs, and each worker keeps them in memory.",
    )
    STATIC_TABLES_TIMEOUT = cluster_option(
        "jobmanager.planning.static-tables.timeout",
        DurationType(1),
        120_000,
        "How long Spark may take to read a static table while a PySpark program is planned. Its tasks need cores that "
        "no job of the session holds.",
    )


class HighAvailabilityType(StrEnum):
    """Where a session stores the data that its successor needs."""

    NONE = "none"
    FILESYSTEM = "filesystem"


class HighAvailabilityOptions:
    """Data that outlives the driver. A new session with the same directory and cluster id continues all jobs."""

    TYPE = cluster_option(
        "high-availability.type",
        EnumType(HighAvailabilityType),
        HighAvailabilityType.NONE,
        "filesystem keeps jobs, their changes, pointers to their checkpoints and their results in a directory.",
    )
    STORAGE_DIRECTORY = cluster_option(
        "high-availability.storageDir",
        NON_EMPTY_STRING,
        None,
        "Directory (path or URL) that every driver of this cluster can reach. Required by type filesystem.",
    )
    CLUSTER_ID = cluster_option(
        "high-availability.cluster-id",
        NON_EMPTY_STRING,
        "default",
        "Name of the cluster below the directory. Sessions with the same name take over from each other.",
    )


class LogFormat(StrEnum):
    """How a line of the log is written."""

    TEXT = "text"
    JSON = "json"


class LoggingOptions:
    """The file that the session's output goes to, with that of workers in local mode, and its lines."""

    FORMAT = cluster_option(
        "env.log.format",
        EnumType(LogFormat),
        LogFormat.TEXT,
        "Format of the log lines of driver, slot agents and workers. `json`: one object per line, with ids.",
    )

    MAX_SIZE = cluster_option(
        "env.log.max-size",
        MemorySizeType(minimum=4_096),
        64 << 20,
        "A log file that exceeds this size is emptied; its last part of this size is kept beside it.",
    )
    MAX_FILES = cluster_option(
        "env.log.max",
        IntegerType(minimum=1, maximum=1_000),
        5,
        "Number of old log files that are kept (`<file>.1` is the newest).",
    )


class QueryStop(StrEnum):
    """What ``StreamingQuery.stop()`` does with the query's job."""

    CANCEL = "CANCEL"
    SAVEPOINT = "SAVEPOINT"


class ConnectOptions:
    """The endpoint for PySpark clients (``sc://host:port``)."""

    ENABLED = cluster_option(
        "connect.enabled",
        BOOLEAN,
        False,
        "Whether the session serves Spark Connect. A client can run any code in Spark and in the driver's JVM.",
    )
    PORT = cluster_option(
        "connect.port",
        IntegerType(minimum=0, maximum=65_535),
        15_002,
        "Port of Spark Connect; 0 takes any free one. It listens on rest.bind-address, uses TLS if the REST API "
        "does, and requires the same token.",
    )
    STOP = cluster_option(
        "connect.query.stop",
        EnumType(QueryStop),
        QueryStop.CANCEL,
        "What StreamingQuery.stop() does: CANCEL ends the job, SAVEPOINT takes a savepoint in "
        "execution.checkpointing.savepoint-dir first and keeps the job running if that fails.",
    )


class SecurityOptions:
    """TLS. Off by default."""

    REST_ENABLED = cluster_option(
        "security.ssl.rest.enabled", BOOLEAN, False, "The REST API accepts only TLS (1.2 or later)."
    )
    REST_CERTIFICATE = cluster_option(
        "security.ssl.rest.certificate",
        NON_EMPTY_STRING,
        None,
        "PEM file with the server's certificate and the intermediate certificates up to an authority that clients "
        "trust. It has to contain the address that clients use.",
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
        "Control and data sockets use TLS 1.3, and both sides present a certificate. They still authenticate with "
        "the session's secret.",
    )
    INTERNAL_CERTIFICATE = cluster_option(
        "security.ssl.internal.certificate",
        NON_EMPTY_STRING,
        None,
        "PEM file with the certificate that driver, agents and workers present to each other: a path that exists on "
        "every machine of the session.",
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
        "PEM file with the authority that has signed these certificates, and which only this session or cluster "
        "uses; on every machine of the session. Host names in certificates are not checked.",
    )


_PORT = IntegerType(minimum=0, maximum=65_535)


class RestAuthentication(StrEnum):
    """How a REST call is authenticated."""

    TOKEN = "TOKEN"
    NONE = "NONE"


class AuditDestination(StrEnum):
    """Where audit records of changes are written."""

    NONE = "NONE"
    LOG = "LOG"
    FILE = "FILE"


class RestOptions:
    """The REST endpoint."""

    PORT = cluster_option("rest.port", _PORT, 8_081, "Port at which clients reach the API; 0 takes any free one.")
    ADDRESS = cluster_option(
        "rest.address",
        NON_EMPTY_STRING,
        None,
        "Name or address at which clients reach the API, as the session prints it and publishes it in the "
        "high-availability directory. Not set: the address on which the server listens.",
    )
    BIND_ADDRESS = cluster_option(
        "rest.bind-address",
        NON_EMPTY_STRING,
        "127.0.0.1",
        "Address on which the server listens. Anything but a loopback address needs a token.",
    )
    AUTHENTICATION = cluster_option(
        "rest.authentication",
        EnumType(RestAuthentication),
        RestAuthentication.TOKEN,
        "TOKEN requires the token in every request, and a session without one does not start. NONE lets every user "
        "of the machine run code as the session's user; it is allowed on loopback addresses only.",
    )
    TOKEN = cluster_option(
        "rest.token",
        NON_EMPTY_STRING,
        None,
        "Bearer token that every request has to carry. Use a file or the environment variable CKPT_REST_TOKEN to "
        "keep it out of process lists.",
        secret=True,
    )
    TOKEN_FILE = cluster_option("rest.token-file", NON_EMPTY_STRING, None, "File that contains the token.")
    MAX_CONTENT_LENGTH = cluster_option(
        "rest.server.max-content-length",
        MemorySizeType(minimum=1 << 10),
        100 << 20,
        "Maximum size of a request's body.",
    )
    MAX_METRIC_SERIES = cluster_option(
        "rest.metrics.max-series",
        IntegerType(minimum=0, maximum=10_000_000),
        20_000,
        "Maximum number of series of subtasks and operators in /metrics; those of subtasks come first. "
        "ckpt_metrics_series_left_out is the number of omitted series.",
    )
    EVENT_BUFFER_SIZE = cluster_option(
        "rest.events.buffer-size",
        IntegerType(minimum=1, maximum=1_000_000),
        4_096,
        "Number of events that are kept for clients of event streams that were disconnected or are slow.",
    )
    AUDIT_DESTINATION = cluster_option(
        "rest.audit.destination",
        EnumType(AuditDestination),
        AuditDestination.NONE,
        "Where REST requests that change something are recorded: the logger ckpt_runtime.audit (LOG), or "
        "rest.audit.file (FILE).",
    )
    AUDIT_FILE = cluster_option(
        "rest.audit.file",
        NON_EMPTY_STRING,
        None,
        "Absolute path of a file on the driver's machine; records are appended, one JSON document per line.",
    )
    MAX_CONNECTIONS = cluster_option(
        "rest.server.max-connections",
        IntegerType(minimum=1, maximum=65_535),
        512,
        "Maximum number of connections that are served at a time; requests on further ones get 503.",
    )
