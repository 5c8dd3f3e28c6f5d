"""Inside a Spark application: session entry, the barrier stage of slot agents, worker processes, detached launch."""
