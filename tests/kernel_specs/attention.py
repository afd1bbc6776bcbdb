SPECS: dict[str, list[object]] = {}  # no kernels of its own
