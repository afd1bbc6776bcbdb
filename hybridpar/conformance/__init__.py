"""A conformance suite for parallel modules of any framework: it compares them with one process in
float64.

    def mlp(plain, group):                 # `plain`: the same in one process, in float64, to take
                                           weights from
        ...                                # a module of `group`'s ranks, whose parameters have
                                           plain's names
        return Built(module, finish=...)   # or the module alone

    for result in conform({"mlp": mlp}, ranks=(1, 2, 3)):
        print(result)

Each case (`CASES`) is a way in which frameworks were silently wrong. It runs on CPUs, with Gloo.
`hybridpar conform module:FACTORIES` does the same from the command line; `ours.FACTORIES` are of
hybridpar's layers.
"""

from hybridpar.conformance.cases import CASES, Built, Case, Factory
from hybridpar.conformance.run import Finding, Result, conform

__all__ = ["CASES", "Built", "Case", "Factory", "Finding", "Result", "conform"]
