"""Airflow provider for checkpointing stream jobs: it only calls the REST API of a running job manager.

From the bottom: ``hooks`` make a client of a connection; ``conditions`` request the state of the remote side and judge
it, and wait for it; ``event_hub`` wakes all waits of a triggerer at one job manager; ``jobs`` finds the job that a name
means, and the snapshot that a new job starts from; ``upgrades`` has the steps of upgrades, suspensions and
resumptions; ``triggers`` carry a condition into the triggerer; ``retry`` decides which failures are retried; ``tasks``
is what operators and sensors share; ``operators``, ``sensors``, ``assets`` and ``dags`` are what DAG authors import.
``plugins`` shows the job manager's pages in Airflow.

Rules for all of them:

* A request is first recorded in the task's journal, with an id that the task makes, so that a retry finds it.
* A wait is the same condition in a worker and in the triggerer, and logs its progress in both.
* Every request is repeated for a configured time while the job manager does not answer or does not lead yet. A request
  that is refused as malformed, and a job that is unknown several times in a row, fail the task without a retry.
* If an earlier try's job has committed output, a job starts without state only when a person requests it.
* A deadline cancels nothing unless it is configured to. A killed task logs what becomes of the remote side, and ends it
  only when the task is given up: marked failed, or deleted. A cleared task continues with it.
* A DAG file that imports the package loads no heavy library, and opens no connection while it is parsed. Spark never
  runs in Airflow's process. The plugin never gives a token to a browser, and never passes on a change.
* Of the engine, only the client is imported, the files of the pages, and, for a connection with a high-availability
  directory, what finds the leader there.
"""

__version__ = "0.1.0"
