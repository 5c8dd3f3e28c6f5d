"""Airflow provider for checkpointing stream jobs: it speaks REST to a running job manager and nothing else.

From the bottom: ``hooks`` make a client of a connection; ``conditions`` look at the remote side and judge what they
see, ``event_hub`` wakes all waits of a triggerer at one job manager; ``jobs`` finds the job that a name means, and what
a new job starts from; ``upgrades`` has the steps of upgrades, suspensions and resumptions; ``triggers`` carry a
condition into the triggerer; ``retry`` decides which failures are retried; ``tasks`` is what operators and sensors
share; ``operators``, ``sensors``, ``assets`` and ``dags`` are what DAG authors import.
``plugins`` shows the job manager's pages in Airflow.

What holds everywhere:

* A request is recorded in the task's journal first, with an id that the task makes, so that a retry finds it.
* A wait is the same condition in a worker and in the triggerer, and logs in both where it stands.
* Every request waits for a job manager that is away, or does not lead yet, for a configured time. A request that is
  refused as malformed, and a job that is unknown several times in a row, fail the task without a retry.
* No job starts from nothing where an earlier try's job has committed output, unless a person asks for it.
* A deadline cancels nothing unless asked to. A killed task logs what becomes of the remote side, and ends it only when
  the task is given up: marked failed, or deleted. A cleared task continues with it.
* A DAG file that imports the package loads no heavy library, and opens no connection while it is parsed. Spark never
  runs in Airflow's process. The plugin never gives a token to a browser, and never passes on a change.
* Of the engine, only the client is imported, the files of the pages, and, for a connection with a high-availability
  directory, what finds the leader there.
"""

__version__ = "0.1.0"
