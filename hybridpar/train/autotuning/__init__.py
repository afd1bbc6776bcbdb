"""Settings that are "auto": measured on the machines of the run, before its first step."""
