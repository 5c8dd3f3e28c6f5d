"""What tells people about a job."""
