"""``hardpoint plugins new``: a plugin package that installs, is discovered, and holds one working kernel per family.

The files are rendered from ``template/`` beside this module, which holds all their text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Self

from hardpoint_plugin_api import API_VERSION, ConfigError, PluginConflictError, UnknownNameError
from hardpoint_plugin_api.families import FAMILIES
from hardpoint_plugin_api.manifest import is_name

_KERNELS = ("op", "attention", "layer", "linear")
"""The families whose templates have kernels in every language; those of others are Python and PyTorch."""

TEMPLATED = (
    *_KERNELS,
    "platform",
    "element",
    "quantization",
    "experts",
    "all2all",
    "communicator",
    "tool_parser",
    "reasoning_parser",
)
"""The families that there is a template for."""

UNTEMPLATED = {
    "model": "models are built from core's layers: start from a file of hardpoint/models",
    "drafter": "a drafter is one short class: start from hardpoint/drafters/ngram.py",
}
"""The other families, and what to do instead."""

LANGUAGES = ("torch", "triton", "cpp")
_DTYPES = {
    "torch": ("float32", "float16", "bfloat16"),
    "triton": ("float32", "float16", "bfloat16"),
    "cpp": ("float32", "bfloat16"),
}
_MODULES: dict[str, tuple[str, ...]] = {
    "op": (),  # its kernel is all there is
    "layer": ("norm",),
    "element": ("elements",),
    "quantization": ("quantization", "samples"),
    "tool_parser": ("parsers", "samples"),
    "reasoning_parser": ("parsers", "samples"),
}
"""The modules of a family, where it is not one of its own name."""
_AXES = "\n\nAxes: T tokens, H query heads, K KV heads, D head size, S keys of one request.\n"


@dataclass(frozen=True)
class Recipe:
    """Order for a scaffold: the plugin's name, its families in the order of TEMPLATED, and the kernels' language."""

    name: str
    families: tuple[str, ...]
    language: str

    @classmethod
    def create(cls, name: str, families: Sequence[str], language: str) -> Self:
        """Check what the user gave.

        Raises ConfigError for a malformed name or a family without a template, UnknownNameError for a family or
        language that does not exist, PluginConflictError where a plugin of that name is installed.
        """
        if not is_name(name):
            raise ConfigError(
                f"{name!r} cannot be a plugin's name: use lower-case letters, digits and underscores, a letter first, "
                "such as acme"
            )
        for family in families:
            if family not in FAMILIES:
                raise UnknownNameError("family", family, TEMPLATED)
            if family not in TEMPLATED:
                raise ConfigError(
                    f"there is no template for the family {family!r}: {UNTEMPLATED[family]}; there are "
                    f"{', '.join(TEMPLATED)}"
                )
        if not families:
            raise ConfigError(f"--families is empty; choose among {', '.join(TEMPLATED)}")
        if language not in LANGUAGES:
            raise UnknownNameError("language", language, LANGUAGES)
        if language != "torch" and not set(families) & set(_KERNELS):
            raise ConfigError(
                f"--language {language}: the templates of {', '.join(families)} have no kernels; name one of "
                f"{', '.join(_KERNELS)}, too, or leave it out"
            )
        _refuse_installed(name)
        return cls(name, tuple(f for f in TEMPLATED if f in families), language)

    @property
    def distribution(self) -> str:
        """The distribution's name, for pip."""
        return f"hardpoint-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """The package's name, for Python's import."""
        return f"hardpoint_{self.name}"

    def _kernels(self) -> bool:
        return bool(set(self.families) & set(_KERNELS))

    def _modules(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(module for f in self.families for module in _MODULES.get(f, (f,))))

    def sources(self) -> dict[str, str]:
        """The template of each file that is written, by its path."""
        package, by_language = f"src/{self.package}", f"package/kernels_{self.language}.py"
        found = {
            "pyproject.toml": "pyproject.toml",
            "README.md": "README.md",
            ".gitignore": "gitignore",
            ".github/workflows/ci.yml": "ci.yml",
            "tests/test_plugin.py": "tests/test_plugin.py",
            f"{package}/hardpoint.toml": "package/hardpoint.toml",
            f"{package}/__init__.py": "package/__init__.py",
            f"{package}/plugin.py": "package/plugin.py",
            f"{package}/py.typed": "package/py.typed",
        }
        found |= {f"{package}/{module}.py": f"package/{module}.py" for module in self._modules()}
        if self._kernels():
            found[f"{package}/kernels.py"] = by_language
        if self.language == "cpp":
            found |= {f"{package}/{f}": f"package/{f}" for f in ("kernels.cpp", "_kernels.pyi")}
            found["setup.py"] = "setup.py"
        if self.language == "triton":
            found["tests/conftest.py"] = "tests/conftest.py"
        return found

    def values(self) -> dict[str, object]:
        """Values for the placeholders of templates."""
        on_host = [self.name, "cpu"] if "platform" in self.families else ["cpu"]
        platforms = on_host if self.language == "cpp" else []  # any; Triton's kernels say themselves where they run
        uses = {
            "op": ("op.rms_norm", f"{self.name}_rms_norm"),
            "attention": ("attention", f"{self.name}_paged"),
            "layer": ("layer.norm", f"{self.name}_norm"),
            "linear": ("linear", f"{self.name}_linear"),
        }
        dtypes = _DTYPES[self.language]
        return {
            "name": self.name,
            "title": "".join(part.capitalize() for part in self.name.split("_")),
            "distribution": self.distribution,
            "package": self.package,
            "families": list(self.families),
            "language": self.language,
            "kernels": self._kernels(),
            "parsers": "parsers" in self._modules(),
            "samples": "samples" in self._modules(),
            "api": str(API_VERSION),
            "next_major": API_VERSION.major + 1,
            "axes": _AXES if "attention" in self.families else "",
            "platforms": json.dumps(platforms),
            "dtypes": json.dumps(dtypes),
            "specs": json.dumps([f"{dtype}/{dtype}" for dtype in dtypes]),
            "use": dict(uses[f] for f in self.families if f in uses),
            "platform": self.name if "platform" in self.families else "cpu",
        }


def write(recipe: Recipe, folder: Path) -> list[Path]:
    """Write the package into ``folder``, which must not exist or be empty; returns the files' paths.

    Raises ConfigError where the folder is in use or cannot be written.
    """
    from jinja2 import Environment, StrictUndefined

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists already and is not empty; choose another with --folder, or remove it")
    environment = Environment(  # renders source code, not HTML
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined
    )
    templates, values, written = files(__package__).joinpath("template"), recipe.values(), []
    for path, source in recipe.sources().items():
        text = templates.joinpath(f"{source}.jinja").read_text(encoding="utf-8")
        target = folder / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(environment.from_string(text).render(values), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {target}: {error.strerror}") from error
        written.append(target)
    return written


def _refuse_installed(name: str) -> None:
    from hardpoint.plugin_host.discovery import discover

    for record in discover().records:
        if record.name == name:
            raise PluginConflictError(
                f"a plugin named {name!r} is installed already: {record.distribution} {record.version}; choose another "
                f"name, or pip uninstall {record.distribution}"
            )
