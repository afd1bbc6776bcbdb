"""Ranks that fail: they are noticed, explained and started again; faults are made to happen to test
that."""
