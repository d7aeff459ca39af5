"""Checks a model as a server does before it opens its port. Arguments: an id of the hub, and a format."""

from __future__ import annotations

import sys

from hardpoint.config import EngineConfig
from hardpoint.engine.model_check import check_model
from hardpoint_plugin_api import CheckpointError

if __name__ == "__main__":
    try:
        check_model(EngineConfig.create(model=sys.argv[1], config_format=sys.argv[2]))
    except CheckpointError as error:
        sys.exit(str(error))
