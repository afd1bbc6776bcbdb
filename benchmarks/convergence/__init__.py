"""The convergence study: what stale gradients cost at equal tokens, and what wins it back. See
README.md."""
