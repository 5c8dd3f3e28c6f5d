"""What can be waited for, and how a wait goes; see :mod:`airflow_provider_ckpt.conditions.base`."""
