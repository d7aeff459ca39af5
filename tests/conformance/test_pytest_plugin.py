"""The pytest plugin of the kit, which every pytest run loads where core is installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

_RUN = """
import sys, pytest
assert pytest.main(["-p", "no:cacheprovider", "-q", "test_own.py"]) == 0
loaded = {name for name in sys.modules if name.partition(".")[0] in ("hardpoint", "hardpoint_plugin_api")}
print("loaded:", *sorted(loaded))
print("heavy:", *sorted({"torch", "numpy", "transformers", "pydantic", "covertable"} & set(sys.modules)))
"""


def test_a_run_that_does_not_ask_for_the_kit_imports_none_of_it(tmp_path: Path) -> None:
    # The option is unknown where the plugin is not loaded.
    own = "def test_own(pytestconfig):\n    pytestconfig.getoption('hardpoint_plugin')\n"
    (tmp_path / "test_own.py").write_text(own)
    done = subprocess.run([sys.executable, "-c", _RUN], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (loaded,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("loaded:")]
    assert loaded == ["hardpoint", "hardpoint.conformance", "hardpoint.conformance.pytest_plugin"]
    (heavy,) = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("heavy:")]
    assert heavy == []
