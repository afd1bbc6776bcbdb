"""Forecast a run's costs before it starts: schedule, state tiers, host optimizer, offloading."""
