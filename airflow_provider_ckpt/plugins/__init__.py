"""What Airflow shows beside its own pages."""
