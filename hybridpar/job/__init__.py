"""A job derived from its configuration: which rank computes which blocks, in which order, with
which state.
"""

from hybridpar.job.job_plan import JobPlan

__all__ = ["JobPlan"]
