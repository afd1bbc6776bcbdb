"""How gradients and weights are summed over replicas and sites."""
