"""Failures of ranks: detection, diagnosis and restart, and injected faults to test them."""
