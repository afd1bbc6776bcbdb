"""Reports of a run: progress, metrics, plots, trackers, measured costs."""
