"""Every reader of files, on valid files that were mutated: no crash, hang or large allocation; a
clear error, or none.

target.py      what a target is; targets.py: all of them
checkpoints.py data.py imports.py settings.py    the readers, each with small valid files
mutate.py      bytes, JSON trees, TOML tables and arrays, changed at random; pickles.py: files of
               torch.save
harness.py     one input: memory and time measured, exceptions judged
__main__.py    python -m tests.fuzz --inputs 1000000: many, in child processes; test_fuzz.py: some,
               by hypothesis
"""
