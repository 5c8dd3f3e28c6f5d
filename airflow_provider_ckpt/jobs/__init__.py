"""Which job a task means, and what a new job starts from."""
