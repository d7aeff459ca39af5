"""Tests of the simulated accelerator, collected where it is installed.

The default suite installs it for a child process of its own: see tests/engine/test_simulated_device.py.
"""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("hardpoint_sim") else ["test_*.py"]
