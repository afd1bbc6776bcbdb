"""What follows from a configuration: which rank computes what, in which order, with which state."""

from hybridpar.job.job_plan import JobPlan

__all__ = ["JobPlan"]
