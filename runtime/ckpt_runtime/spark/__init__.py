"""Inside a Spark application: session entry, the stages of slot agents, worker processes, detached launch."""
