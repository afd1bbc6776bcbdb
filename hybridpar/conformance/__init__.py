"""A conformance suite for parallel modules of any framework: compares them with one process in
float64.

    def mlp(plain, group):                 # `plain`: the module in one process, in float64, to take
                                           # weights from
        ...                                # a module for `group`'s ranks, whose parameters have
                                           # plain's names
        return Built(module, finish=...)   # or the module alone

    for result in conform({"mlp": mlp}, ranks=(1, 2, 3)):
        print(result)

Each case (`CASES`) is a way in which a framework was silently wrong. The suite runs on CPUs, with
Gloo. `hybridpar conform module:FACTORIES` runs it from the command line; `ours.FACTORIES` has
hybridpar's layers.
"""

from hybridpar.conformance.cases import CASES, Built, Case, Factory
from hybridpar.conformance.run import Finding, Result, conform

__all__ = ["CASES", "Built", "Case", "Factory", "Finding", "Result", "conform"]
