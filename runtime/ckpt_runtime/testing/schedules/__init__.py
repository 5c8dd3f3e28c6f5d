"""What every simulation shares: schedules from seeds, running many, shrinking and showing those that fail."""
