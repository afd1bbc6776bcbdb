"""What becomes of a job whose ranks fail: seen, explained, started again; and faults made to happen, to test that."""
