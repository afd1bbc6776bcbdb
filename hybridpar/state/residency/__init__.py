"""Residency of state: chunks, tiers, shards, and the items that each action accesses."""
