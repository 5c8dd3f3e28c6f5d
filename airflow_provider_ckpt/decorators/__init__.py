"""Task decorators: a function of the DAG file becomes a task."""
