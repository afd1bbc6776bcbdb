"""What a run says about itself: progress, metrics, pictures, trackers, measured costs."""
