"""The report of `hybridpar memory`: its sections, drawings and page."""
