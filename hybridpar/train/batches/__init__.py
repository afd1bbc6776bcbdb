"""A training batch on one rank: its sums over the grid, decisions, updates and result."""
