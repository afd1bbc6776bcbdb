"""The search over configurations, and its report."""
