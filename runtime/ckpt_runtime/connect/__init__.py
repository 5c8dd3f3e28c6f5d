"""The endpoint for PySpark clients (``sc://host:port``): streaming queries become jobs, other requests go to Spark."""

import os

# gRPC would otherwise prepare for the forks of this process and warn of each; its children never use gRPC's threads.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
