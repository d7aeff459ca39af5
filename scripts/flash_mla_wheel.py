"""Make a wheel of FlashMLA from the build that vLLM ships, for machines that cannot compile it.

    python3 scripts/flash_mla_wheel.py FOLDER [VLLM_VERSION]

FlashMLA (github.com/deepseek-ai/FlashMLA, MIT licence) is on no index. vLLM's wheel has its extension for sm_90 and
sm_100, and its Python module. FOLDER gets ``flash_mla-1.0.0+vllmVERSION``, which needs the torch that this vLLM needs.
Needs ``pip`` and the package ``wheel``, and an index with vLLM (a download of 250 MB).
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from wheel.wheelfile import WheelFile

VLLM = "0.25.0"
"""The newest that needs torch 2.11."""

EXTENSION = "vllm/_flashmla_C.abi3.so"
MODULE = "vllm/third_party/flashmla/flash_mla_interface.py"
IMPORT = "import vllm._flashmla_C"
EXPORTS = "get_mla_metadata", "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
TAG = "cp39-abi3-manylinux_2_28_x86_64"


def download(version: str, folder: Path) -> Path:
    """vLLM's wheel of ``version``, in ``folder``."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    platform = ["--only-binary=:all:", "--python-version", "3.12", "--platform", "manylinux_2_28_x86_64"]
    subprocess.run([*pip, *platform, "--dest", str(folder), f"vllm=={version}"], check=True)
    (found,) = folder.glob("vllm-*.whl")
    return found


def repack(source: Path, folder: Path, version: str) -> Path:
    """Write the wheel of ``flash_mla`` to ``folder``. Raises SystemExit where ``source`` has it in another form."""
    name = f"flash_mla-1.0.0+vllm{version}"
    with zipfile.ZipFile(source) as vllm:
        if missing := {EXTENSION, MODULE}.difference(vllm.namelist()):
            raise SystemExit(f"{source.name} has no {', '.join(sorted(missing))}; name a version of vLLM that has")
        extension, interface = vllm.read(EXTENSION), vllm.read(MODULE).decode()
    if IMPORT not in interface:
        raise SystemExit(f"{MODULE} of {source.name} does not say {IMPORT}; name a version of vLLM that does")
    found = folder / f"{name}-{TAG}.whl"
    with WheelFile(str(found), "w") as wheel:
        wheel.writestr("flash_mla/_flashmla_C.abi3.so", extension)
        wheel.writestr("flash_mla/flash_mla_interface.py", interface.replace(IMPORT, "import flash_mla._flashmla_C"))
        wheel.writestr("flash_mla/__init__.py", f"from .flash_mla_interface import {', '.join(EXPORTS)}\n")
        about = f"Metadata-Version: 2.1\nName: flash-mla\nVersion: 1.0.0+vllm{version}\nLicense: MIT\n"
        wheel.writestr(f"{name}.dist-info/METADATA", about)
        form = f"Wheel-Version: 1.0\nGenerator: flash_mla_wheel\nRoot-Is-Purelib: false\nTag: {TAG}\n"
        wheel.writestr(f"{name}.dist-info/WHEEL", form)
    return found


def main() -> None:
    """See the top of this file."""
    if len(sys.argv) not in (2, 3):
        raise SystemExit(__doc__)
    folder, version = Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else VLLM
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as downloads:
        print(repack(download(version, Path(downloads)), folder, version))


if __name__ == "__main__":
    main()
