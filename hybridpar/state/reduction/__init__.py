"""Reduction of gradients and weights over replicas and sites."""
