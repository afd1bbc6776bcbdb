"""Performance claims: one file each, which runs hybridpar and a peer side by side.
`python -m benchmarks` runs all."""
