"""Recorders of the memory events of an engine, and the trace that is predicted on ghosts."""
