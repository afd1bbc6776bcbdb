"""All targets."""

from . import checkpoints, data, imports, settings

TARGETS = (*checkpoints.TARGETS, *data.TARGETS, *imports.TARGETS, *settings.TARGETS)
BY_NAME = {target.name: target for target in TARGETS}
