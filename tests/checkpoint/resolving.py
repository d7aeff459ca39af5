"""Prints the folder of the model that the arguments name: an id of the hub, and perhaps a revision."""

from __future__ import annotations

import sys

from hardpoint.checkpoint.source import resolve_model
from hardpoint_plugin_api import CheckpointError

if __name__ == "__main__":
    try:
        print(resolve_model(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
    except CheckpointError as error:
        sys.exit(str(error))
