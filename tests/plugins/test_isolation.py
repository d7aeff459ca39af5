"""Side effects that discovery must not have, seen from a process of its own; and editable plugins."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.out_of_tree.build import install_editable
from tests.plugins.catalog import plugin
from tests.plugins.conftest import Installer


def run(code: str, site: Path) -> None:
    """Run ``code`` in a fresh process that sees ``site``, its .pth files included."""
    code = f"import site, sys; site.addsitedir({str(site)!r})\n{code}"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


def test_discovery_imports_no_plugin_and_nothing_heavy(installed: Installer) -> None:
    site = installed("kit", "raises", "zebra")
    run(
        "from hardpoint.plugin_host import discover\n"
        "plugins = discover()\n"
        "assert {'kit', 'raises', 'zebra'} <= {r.name for r in plugins.records if r.is_usable}\n"
        "plugins.offers('op'), plugins.config_keys(), plugins.devices(), plugins.record('kit').content_hash()\n"
        "heavy = {'torch', 'pydantic', 'rich', 'hardpoint.plugin'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "assert not [m for m in sys.modules if m.startswith('hp_')]\n",
        site,
    )


def test_a_plugin_that_is_not_selected_is_never_imported(installed: Installer) -> None:
    site = installed("kit", "zebra")
    for module in ("__init__", "plugin"):
        (site / "hp_zebra" / f"{module}.py").write_text(
            "from pathlib import Path; Path(__file__).with_name('ran').touch()"
        )
    run(
        "from hardpoint.plugin_host import discover\n"
        "plugins = discover(['kit'])\n"
        "plugins.activate('kit')\n"
        "for offer in plugins.offers('op', 'kit_norm'): plugins.load(offer)\n"
        "try: plugins.activate('zebra')\n"
        "except Exception as error: assert 'not on the list' in str(error)\n"
        "else: raise SystemExit('zebra was activated')\n",
        site,
    )
    assert not (site / "hp_zebra" / "ran").exists()
    run("from hardpoint.plugin_host import discover\ndiscover().activate('zebra')\n", site)
    assert (site / "hp_zebra" / "ran").exists()


@pytest.mark.parametrize("last", ["explain", "env"])
def test_a_platform_is_imported_as_security_md_says(last: str, installed: Installer) -> None:
    """SECURITY.md says which commands look for devices, and hence import what declares a platform: ``last`` does, and
    of those before it in its process none."""
    pytest.importorskip("hardpoint_cpu")
    before = {
        "explain": [["explain", "--platform", "cpu"], ["explain", "--plugins", "core,cpu"]],
        "env": [["plugins", "list"], ["ops", "list"], ["generate", "--help"]],
    }
    code = "from hardpoint.cli.main import run\n"
    for arguments in before[last]:
        code += f"assert run({arguments}) == 0\nassert 'hp_scout.platform' not in sys.modules, {arguments}\n"
    run(f"{code}assert run([{last!r}]) == 0\nassert 'hp_scout.platform' in sys.modules\n", installed("scout"))


def test_metadata_of_other_distributions_is_not_parsed(installed: Installer) -> None:
    site = installed("kit")
    for number in range(300):
        folder = site / f"extra_{number}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: extra-{number}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text("[console_scripts]\nextra = extra:main\n")
    run(
        "opened = []\n"
        "sys.addaudithook(lambda event, args: opened.append(str(args[0])) if event == 'open' else None)\n"
        "from hardpoint.plugin_host import discover\n"
        "assert discover().record('kit').is_usable\n"
        "assert sum(path.endswith('entry_points.txt') for path in opened) >= 300\n"
        "assert not [path for path in opened if path.endswith('METADATA') and 'extra_' in path]\n",
        site,
    )


def test_an_editable_install(tmp_path: Path) -> None:
    site, source = tmp_path / "site", tmp_path / "source"
    install_editable(plugin("bench"), site, source)
    code = (
        "from hardpoint.plugin_host import discover\n"
        "record = discover(['bench']).record('bench')\n"
        f"assert (record.editable, str(record.folder)) == (True, {str(source / 'src' / 'hp_bench')!r}), record\n"
        "assert len(record.content_hash()) == 64\n"
    )
    run(code, site)
    elsewhere = tmp_path / "elsewhere" / "hp_bench"
    elsewhere.mkdir(parents=True)
    (elsewhere / "__init__.py").write_text("")
    run(
        f"sys.path.insert(0, {str(elsewhere.parent)!r})\n"
        "from hardpoint.plugin_host import discover\n"
        "assert 'a namesake is found' in str(discover().record('bench').reason)\n",
        site,
    )


def test_a_module_in_the_environment_within_an_editable_source_tree(tmp_path: Path) -> None:
    """A virtual environment in the source tree holds other distributions' modules, not the tree's own."""
    source = tmp_path / "source"
    site = source / ".venv" / "packages"
    install_editable(plugin("bench"), site, source)
    (site / "hp_bench").mkdir()
    (site / "hp_bench" / "__init__.py").write_text("")
    run(
        "from hardpoint.plugin_host import discover\n"
        "assert 'a namesake is found' in str(discover().record('bench').reason)\n",
        site,
    )
