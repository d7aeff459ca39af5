"""Builds the compiled kernels, where there is a C++ compiler; without one the plugin installs and runs on torch's ops.

Each level of instruction sets is the same source with other flags. HARDPOINT_CPU_LEVELS, or the option --levels of
build_ext, names the levels: ``native`` (the default) is the best that this machine's CPU runs, ``all`` makes a wheel
for every machine, and others are named one by one, as in ``avx2,avx512``. A level that the compiler does not know is
left out.
Set HARDPOINT_CPU_SANITIZE=address,undefined or =thread to build for a sanitizer.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, NamedTuple

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, OptionError

SOURCES = Path("csrc")
HEADERS = [*SOURCES.glob("*.h"), *SOURCES.glob("kernels/*.h")]
KERNELS = sorted(SOURCES.glob("kernels/*.cpp"))
FLAGS = ["-std=c++20", "-O3", "-g0", "-fvisibility=hidden", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"]


_LONGEST = (
    "attention_decode",
    "linear_six_bit_blocks",
    "linear_nibble_blocks",
    "attention_prefill",
    "linear_byte_blocks",
    "linear_float4",
    "linear_int4",
    "linear",
    "latent",
)
"""The families that take longest to compile: more than two seconds each (docs/measurements/host.md)."""


class Level(NamedTuple):
    """The compiler's flags for a level; the level whose objects it has, which are compiled with these flags then."""

    flags: list[str]
    objects_of: str = ""


_AVX2 = ["-mavx2", "-mfma", "-mf16c"]
_AVX512 = [*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512"]
_VNNI = [*_AVX512, "-mavx512vnni"]
_BF16 = [*_VNNI, "-mavx512bf16"]
_AMX = ["-mamx-tile", "-mamx-bf16", "-mamx-int8"]
LEVELS = {
    "x86_64": {
        "amx": Level([*_BF16, *_AMX], objects_of="avx512_bf16"),
        "avx512_bf16": Level(_BF16),
        "avx512_vnni": Level(_VNNI),
        "avx512": Level(_AVX512),
        "avx2": Level(_AVX2),
        "plain": Level([]),
    }
}
"""By machine, best first: what csrc/levels.cpp knows how to recognise. Others have ``plain`` alone.

Tile instructions are assembly in the source and run where a kernel's level allows them (``tiles_allowed`` in
csrc/task.h). So ``amx`` shares the objects of the level below it.
"""

EMULATED = Level(["-DHARDPOINT_EMULATE_TILES"])
"""The level ``amx`` as any machine can run it, for tests; see csrc/kernels/tiles.h."""


_PRINT_LEVELS = """
#include <cstdio>
#include "levels.h"
int main() { for (const char* name : hardpoint::cpu_levels()) std::puts(name); }
"""


class BuildKernels(build_ext):
    """Compiles csrc/kernels/*.cpp once for each level, where they changed, and links all into one extension."""

    user_options: ClassVar = [
        *build_ext.user_options,
        ("levels=", None, "levels to build: native, all, or names, to which plain is added (native)"),
        ("emulate-tiles", None, "build the level amx with its instructions emulated, for tests"),
    ]
    boolean_options: ClassVar = [*build_ext.boolean_options, "emulate-tiles"]

    def initialize_options(self) -> None:
        super().initialize_options()
        self.levels: str | None = None
        self.emulate_tiles = False

    def finalize_options(self) -> None:
        super().finalize_options()
        self.levels = self.levels or os.environ.get("HARDPOINT_CPU_LEVELS") or "native"
        known = {"plain", *(name for levels in LEVELS.values() for name in levels)}
        if self.levels not in ("native", "all") and (unknown := set(self.levels.split(",")) - known):
            # Checked here: setuptools lets errors pass while it builds what is optional.
            names = ", ".join(sorted(known))
            raise OptionError(f"levels must be native, all, or some of {names}; not {', '.join(sorted(unknown))}")
        if self.editable_mode:  # objects outlive the installation, for the next one with other levels
            self.build_temp = "build/editable"

    def build_extension(self, ext: Extension) -> None:
        machine = {"amd64": "x86_64"}.get(platform.machine().lower(), platform.machine().lower())
        levels = LEVELS.get(machine, {"plain": Level([])})
        if self.emulate_tiles:
            levels = {"amx": EMULATED, **{name: level for name, level in levels.items() if name != "amx"}}
        Path(self.build_temp).mkdir(parents=True, exist_ok=True)
        known = self._chosen(levels)
        made = {name: [(level.objects_of or name, source) for source in KERNELS] for name, level in known.items()}
        files = sorted({file for families in made.values() for file in families}, key=_longest_first)
        flags = {name: level.flags for name, level in known.items()}
        flags |= {level.objects_of: level.flags for level in known.values() if level.objects_of}
        with ThreadPoolExecutor(self.parallel or os.cpu_count()) as pool:
            objects = list(pool.map(lambda file: self._compile(*file, flags[file[0]]), files))
        listed = {
            name: " ".join(f"F({level}, {source.stem})" for level, source in families)
            for name, families in made.items()
        }
        ext.define_macros += [
            ("HARDPOINT_LEVELS", " ".join(f"X({name}, {families})" for name, families in listed.items())),
            *([("HARDPOINT_EMULATE_TILES", None)] if self.emulate_tiles else []),
        ]
        ext.extra_objects = objects
        super().build_extension(ext)

    def _chosen(self, levels: dict[str, Level]) -> dict[str, Level]:
        """The levels to build: those that were asked for, and what they need; as the compiler allows."""
        assert self.levels is not None
        if self.levels == "native":
            supported = self._supported()
            usable = self._known({name: level for name, level in levels.items() if name in supported})
            best = next(iter(usable))  # plain, if nothing else
            return {name: level for name, level in usable.items() if name in (best, usable[best].objects_of)}
        wanted = set(levels) if self.levels == "all" else {"plain", *self.levels.split(",")}
        wanted |= {level.objects_of for name, level in levels.items() if name in wanted}
        return self._known({name: level for name, level in levels.items() if name in wanted})

    def _known(self, levels: dict[str, Level]) -> dict[str, Level]:
        """The levels that the compiler knows, with what they need."""
        known = {name: level for name, level in levels.items() if self._knows(level.flags)}
        return {name: level for name, level in known.items() if not level.objects_of or level.objects_of in known}

    def _supported(self) -> list[str]:
        """The levels that this machine's CPU runs, as csrc/levels.cpp finds them. All, if compiled for another."""
        with tempfile.TemporaryDirectory() as folder:
            main = Path(folder) / "main.cpp"
            main.write_text(_PRINT_LEVELS, encoding="utf-8")
            macros = [("HARDPOINT_LEVELS", "")]
            objects = self.compiler.compile(
                [str(main), str((SOURCES / "levels.cpp").resolve())],
                output_dir=folder,
                macros=macros,
                include_dirs=[str(SOURCES)],
                extra_postargs=FLAGS,
            )
            self.compiler.link_executable(objects, "levels", output_dir=folder, target_lang="c++")
            try:
                done = subprocess.run([str(Path(folder) / "levels")], capture_output=True, text=True, check=True)
            except (OSError, subprocess.CalledProcessError):
                return [name for levels in LEVELS.values() for name in levels]
        return done.stdout.split()

    def _compile(self, level: str, source: Path, flags: list[str]) -> str:
        """The object file of one family at one level, compiled where it is older than anything that went into it.

        Other flags have another folder.
        """
        flags = [*FLAGS, *_sanitizer(), *flags, "-MMD"]
        folder = Path(self.build_temp) / f"{level}-{zlib.crc32(' '.join(flags).encode()):08x}"
        (built,) = self.compiler.object_filenames([str(source)], output_dir=str(folder))
        if _is_outdated(Path(built)):
            macros = [("HARDPOINT_LEVEL", level)]
            with tempfile.TemporaryDirectory(dir=self.build_temp) as part:  # what is cut off is compiled again
                begun = time.time()
                (made,) = self.compiler.compile([str(source)], output_dir=part, macros=macros, extra_postargs=flags)
                os.utime(made, (begun, begun))  # so a file that changed meanwhile is newer
                Path(built).parent.mkdir(parents=True, exist_ok=True)
                for suffix in (".d", ".o"):
                    Path(made).with_suffix(suffix).replace(Path(built).with_suffix(suffix))
        return built

    def _knows(self, flags: list[str]) -> bool:
        """Whether the compiler takes these flags."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "empty.cpp"
            source.write_text("int main() { return 0; }\n", encoding="utf-8")
            try:
                self.compiler.compile([str(source)], output_dir=folder, extra_postargs=[*FLAGS, *flags])
            except CompileError:
                return False
        return True


def _longest_first(file: tuple[str, Path]) -> tuple[bool, int, str, str]:
    """Sorts what takes longest to compile first, so that no core waits for the last one."""
    level, source = file
    place = _LONGEST.index(source.stem) if source.stem in _LONGEST else len(_LONGEST)
    return level == "plain", place, source.stem, level


def _is_outdated(built: Path) -> bool:
    """Whether an object file is missing, or older than a file that the compiler noted beside it (``-MMD``)."""
    noted = built.with_suffix(".d")
    if not built.exists() or not noted.exists():
        return True
    names = noted.read_text(encoding="utf-8").partition(":")[2].replace("\\\n", " ")
    files = [Path(name.replace("\\ ", " ")) for name in re.findall(r"(?:\\ |\S)+", names)]
    made = built.stat().st_mtime
    return any(not file.exists() or file.stat().st_mtime > made for file in files)


def _sanitizer() -> list[str]:
    """Flags of a build for a sanitizer, which names lines in its reports.

    Following variables (more than ``-g1``) and pointers through kernels that are one long function, full of checks,
    takes most of the compiler's time.
    """
    wanted = os.environ.get("HARDPOINT_CPU_SANITIZE")
    return [f"-fsanitize={wanted}", "-fno-omit-frame-pointer", "-g1", "-O1", "-fno-tree-pta"] if wanted else []


setup(
    ext_modules=[
        Extension(
            "hardpoint_cpu._native",
            [str(source) for source in sorted(SOURCES.glob("*.cpp"))],
            depends=[str(file) for file in [*HEADERS, *KERNELS, Path(__file__)]],
            extra_compile_args=[*FLAGS, *_sanitizer()],
            extra_link_args=["-ldl", *_sanitizer()],
            language="c++",
            py_limited_api=True,
            optional=True,
        )
    ],
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
