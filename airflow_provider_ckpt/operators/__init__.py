"""Operators: one module for each thing that can be asked of the job manager."""
