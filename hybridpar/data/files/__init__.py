"""Readers of the files that hold records, of every format."""
