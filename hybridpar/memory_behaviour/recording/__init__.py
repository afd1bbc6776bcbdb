"""Recorders of the memory events of an engine, and the predicted trace on ghosts."""
