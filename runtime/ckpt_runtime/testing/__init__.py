"""Tools for tests of pipelines and of this project: a cluster without Spark, clocks, file systems, checking sinks."""
