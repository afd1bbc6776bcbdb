"""A batch in training: its sums, decisions, updates and result."""
