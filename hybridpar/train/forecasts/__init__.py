"""What a run will take and move, before it starts: simulated plans, tiers, hosts, offloading."""
