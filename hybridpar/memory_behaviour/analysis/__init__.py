"""Analyses of a trace of memory events. None of them needs torch."""
