"""Version of the runtime, shown by REST and the CLI and written into snapshots, and the Flink whose REST API it has."""

VERSION = "0.1.0"
REVISION = "release"
FLINK_VERSION = "2.3.0"
