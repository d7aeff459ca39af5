"""Write down the plugin API as it is now: docs/contract.md, and under plugin_api/src/hardpoint_plugin_api/api/.

    make reference                            # the draft of the version in versions.py, as often as it changes
    python scripts/freeze_api.py --release    # for good: from now on a change needs a new version

A draft is no promise: 0.1 is one until it is released, and freezing it again is no break.

Writes ``names.py`` of the plugin in tests/out_of_tree/api_MAJOR_MINOR too. Other new parts are written by hand:
tests/out_of_tree/test_frozen.py says what is missing. For a new version copy the newest of these folders and rename its
package; the folders of released versions stay as they are.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from hardpoint.authoring.api_reference import render
from hardpoint.authoring.api_surface import Surface, describe_api, frozen, frozen_versions

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Write the reference, and what is frozen unless the version is out."""
    (ROOT / "docs/contract.md").write_text(render(), encoding="utf-8")
    surface = replace(describe_api(), released="--release" in sys.argv[1:])
    if surface.version in frozen_versions() and frozen(surface.version).released:
        sys.exit(f"plugin API {surface.version} is released; set API_VERSION in versions.py to the next version")
    path = ROOT / "plugin_api/src/hardpoint_plugin_api/api" / f"{surface.version}.json"
    path.write_text(surface.to_json(), encoding="utf-8")
    print(f"{path}: {len(surface.entries)} entries, {'released' if surface.released else 'a draft'}")
    suffix = str(surface.version).replace(".", "_")
    plugin = ROOT / f"tests/out_of_tree/api_{suffix}/src/frozen_{suffix}"
    if not plugin.is_dir():
        sys.exit(f"there is no frozen plugin of this version yet: write {plugin.relative_to(ROOT)}")
    (plugin / "names.py").write_text(imports(surface), encoding="utf-8")


def imports(surface: Surface) -> str:
    """A module that imports every public name, sorted as ruff sorts imports."""
    names = sorted((path for path in surface.entries if not {" ", "."} & set(path)), key=str.casefold)
    kinds = [[n for n in names if n.isupper()], [n for n in names if n[0].isupper() and not n.isupper()]]
    kinds.append([n for n in names if n[0].islower()])
    imported = "".join(f"    {name},\n" for kind in kinds for name in kind)
    listed = "".join(f'    "{name}": {name},\n' for name in names)
    return (
        f'"""Every public name of plugin API {surface.version}."""\n\nfrom __future__ import annotations\n\n'
        f"from hardpoint_plugin_api import (\n{imported})\n\nNAMES = {{\n{listed}}}\n"
    )


if __name__ == "__main__":
    main()
