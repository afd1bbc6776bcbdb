"""Memory behaviours: which blocks of memory a rank has, when each is used, and what follows from
it.

    recording/    events of an engine's training, recorded while it runs or predicted on ghosts
    analysis/     behaviour (lifetimes, reuse), swap, fragmentation, arena: without torch
    pictures/     the report of `hybridpar memory`, its drawings and its page

Training imports this package only in a run that records (`train.record_memory`).
"""
