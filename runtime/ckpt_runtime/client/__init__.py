"""The REST client of the runtime, for the command line, Airflow and tests; also speaks to a real Flink cluster.

Imports nothing of the engine. The HTTP library is loaded by ``client.clients`` alone, so that naming a model or an
error does not load it.
"""
