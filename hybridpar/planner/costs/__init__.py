"""The time and memory of a configuration on a machine."""
