"""From PySpark's plan to ours. The only room that knows Spark's plan classes."""
