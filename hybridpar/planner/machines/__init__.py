"""Machines to plan for: devices, links, clusters, and what kernels take on them."""
