"""Inside a Spark application: session entry, the stages of slot agents, worker processes, detached launch.

* User code runs in workers, never in a barrier task, so that its failures do not fail a Spark task.
* A template has one Python thread, runs no user code and has no connection but the one to its agent. Its workers do
  not depend on it: the agent holds them by descriptor, and each watches its own parent.
* An agent or a worker that gets a malformed message from its driver ends with an error that names the message.
* A worker's temporary files are removed with it, by its supervisor or its agent, or by the next agent on that host.
* Spark never retries a stage, and no slot fails because of another one; the slot pool launches a replacement.
* A worker that has run a job ends when its agent does. A worker that has not waits 30 s for another agent to adopt it.
  Without the driver's connection every worker ends at once.
* The ready file is a session file, written when the session leads and removed at the end. Files of a session are
  private; a process is identified by its pid and its start time.
* A session authenticates all peers on Spark's ports, or does not start. The engine's secret is a local property of a
  stage: it is in the message that launches a task, and in no closure. A token or a setting is never put on a command
  line.
* A driver that has lost Spark ends, and releases its leadership. A session does not start if the files of its pyspark
  come from several versions.
* An agent never relays data.
"""
