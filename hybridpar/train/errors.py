"""Errors of one rank in the middle of a job. Imports no torch, so that the command line stays quick."""

from hybridpar.errors import CheckpointError, HybridparError


class RankError(HybridparError):
    """What went wrong on this rank alone; the message names it. The others learn of it by losing contact."""


class LostContactError(RankError):
    """Another rank died or hangs, so this one cannot go on. A consequence, never the cause."""


class AnomalyError(HybridparError):
    """Training has gone wrong in a way that the configuration says to stop at; raised on all ranks together."""


class SaveError(CheckpointError):
    """Saves have failed for so long that the run ends; raised on all ranks together."""
