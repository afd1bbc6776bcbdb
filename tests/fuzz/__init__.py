"""Every reader of files, on valid files that were mutated: no crash, hang or large allocation; a clear error, or none.

    mutate.py    bytes, JSON trees, TOML tables and arrays, changed at random
    targets.py   the readers, each with small valid files
    harness.py   one input: memory and time measured, exceptions judged
    __main__.py  python -m tests.fuzz --inputs 1000000: many, in child processes; test_fuzz.py: some, by hypothesis
"""
