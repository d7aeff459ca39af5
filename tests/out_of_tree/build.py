"""Really installed third-party distributions for tests: from a description to a wheel, and from wheels to a folder."""

from __future__ import annotations

import base64
import hashlib
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

_PIP = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]


@dataclass(frozen=True)
class Dist:
    """A tiny distribution: ``files`` are texts by path, ``plugins`` entry points of the group ``hardpoint.plugins``."""

    name: str
    files: Mapping[str, str] = field(hash=False)
    plugins: Mapping[str, str] = field(default_factory=dict, hash=False)
    version: str = "1.0"

    @property
    def metadata_folder(self) -> str:
        """The folder of its metadata, once it is installed."""
        return f"{self.name.replace('-', '_')}-{self.version}.dist-info"

    @property
    def installed_names(self) -> set[str]:
        """Files that installing it adds to a folder of packages."""
        return {path.partition("/")[0] for path in self.files} | {self.metadata_folder}

    @property
    def entry_points(self) -> str:
        """The text of its ``entry_points.txt``."""
        return "\n".join(["[hardpoint.plugins]", *(f"{name} = {value}" for name, value in self.plugins.items()), ""])


def build_wheel(dist: Dist, folder: Path) -> Path:
    """Write the wheel of ``dist`` into ``folder`` and return its path."""
    info = dist.metadata_folder
    files = {
        **dist.files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {dist.name}\nVersion: {dist.version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": dist.entry_points,
    }
    record = "".join(f"{path},{_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    wheel = folder / f"{info.removesuffix('.dist-info')}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            archive.writestr(path, text)
    return wheel


def install(dists: Iterable[Dist], target: Path, scratch: Path) -> None:
    """Install ``dists`` into the folder ``target``: wheels are written to ``scratch`` and unpacked, as pip would do.

    A process of pip takes more than a second. :func:`install_by_pip` is for what pip itself does.
    """
    for dist in dists:
        with zipfile.ZipFile(build_wheel(dist, scratch)) as wheel:
            wheel.extractall(target)
        folder, installer = target / dist.metadata_folder, "tests\n"
        (folder / "INSTALLER").write_text(installer)
        with (folder / "RECORD").open("a") as record:
            record.write(f"{folder.name}/INSTALLER,{_digest(installer)},{len(installer)}\n")


def install_by_pip(dists: Iterable[Dist], target: Path, scratch: Path) -> None:
    """Install ``dists`` into the folder ``target`` with one call of pip; wheels are written to ``scratch``."""
    wheels = [str(build_wheel(dist, scratch)) for dist in dists]
    subprocess.run([*_PIP, "--no-compile", "--target", str(target), *wheels], check=True, timeout=120)


@contextmanager
def importable(site: Path) -> Iterator[None]:
    """Put ``site`` first on ``sys.path``; at the end its modules are forgotten, so that another site's are found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(site))
        try:
            yield
        finally:
            for name, module in list(sys.modules.items()):
                if Path(getattr(module, "__file__", None) or "").is_relative_to(site):
                    del sys.modules[name]


def install_editable(dist: Dist, target: Path, source: Path) -> None:
    """Write ``dist`` as a source tree to ``source`` (a src layout) and install that editable into ``target``."""
    packages = sorted({path.partition("/")[0] for path in dist.files})
    source.mkdir(parents=True)
    plugins = "".join(f'{name} = "{value}"\n' for name, value in dist.plugins.items())
    (source / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools>=77"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "{dist.name}"\nversion = "{dist.version}"\n'
        f'[project.entry-points."hardpoint.plugins"]\n{plugins}'
        '[tool.setuptools.packages.find]\nwhere = ["src"]\n'
        "[tool.setuptools.package-data]\n" + "".join(f'{name} = ["*.toml"]\n' for name in packages)
    )
    for path, text in dist.files.items():
        (source / "src" / path).parent.mkdir(parents=True, exist_ok=True)
        (source / "src" / path).write_text(text)
    command = [*_PIP, "--no-build-isolation", "--target", str(target), "--editable", str(source)]
    subprocess.run(command, check=True, timeout=300)


def install_project(source: Path, target: Path, scratch: Path) -> None:
    """Install the source tree ``source`` into the folder ``target``; it is built in a copy, in ``scratch``."""
    copy = scratch / source.name
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [*_PIP, "--no-build-isolation", "--target", str(target), str(copy)]
    subprocess.run(command, check=True, capture_output=True, timeout=300)


def _digest(text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256={digest.rstrip('=')}"
