"""Memory behaviours: the memory blocks of a rank, when each is used, and what follows from that.

recording/    events of an engine's training, recorded while it runs or predicted on ghosts
analysis/     behaviour (lifetimes, reuse), swap, fragmentation, arena: without torch
pictures/     the report of `hybridpar memory`, its drawings and its page

Training imports this package only in a run that records (`train.record_memory`).
"""
