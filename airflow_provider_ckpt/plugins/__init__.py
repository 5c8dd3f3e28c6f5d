"""Pages that Airflow shows in addition to its own."""
