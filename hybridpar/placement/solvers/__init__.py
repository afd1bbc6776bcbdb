"""Solvers of operator placement: exact and heuristic ones, mixed-integer programs, and bounds."""
