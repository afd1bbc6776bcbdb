"""Where state is: chunks, tiers, shares, and which actions touch which item."""
