"""Version of the runtime, shown by REST and the CLI and written into snapshots."""

VERSION = "0.1.0"
REVISION = "release"
