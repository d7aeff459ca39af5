"""The reference of the plugin API as Markdown, from docstrings and from what ``hardpoint ops show`` knows.

``docs/contract.md`` is this text; a test compares the two.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType

import hardpoint_plugin_api as api
from hardpoint.authoring.api_diff import signature_of
from hardpoint.authoring.api_surface import Entry, describe_api, hooks, layer_classes, members_of
from hardpoint.ops.catalogue import describe_all
from hardpoint_plugin_api import API_VERSION, FAMILIES, MANIFEST_NAME, MANIFEST_SCHEMA, Feature
from hardpoint_plugin_api.manifest import KEYS
from hardpoint_plugin_api.requests import FEATURE_SINCE
from hardpoint_plugin_api.requirements import VOCABULARY, applies

_TITLES = {
    "contributions": "A plugin's contributions",
    "families": "Families",
    "requests": "Requests to a family",
    "requirements": "Requirements",
    "reasons": "Reasons",
    "context": "The build context",
    "layers": "Layers",
    "step": "Steps",
    "linear": "Linear kernels",
    "attention": "Attention",
    "latent": "Latent attention",
    "cache": "The cache",
    "quant": "Numbers",
    "quantization": "Quantization methods",
    "dequantization": "Dequantization",
    "experts": "Experts",
    "all2all": "All-to-all",
    "platform": "Platforms",
    "device": "Devices",
    "hooks": "Hooks",
    "manifest": "The manifest",
    "versions": "Versions",
    "errors": "Errors",
}
"""The modules of the API in the order of reading; one that is not named here comes last."""


def render() -> str:
    """The whole reference."""
    entries = describe_api().entries
    parts = [
        f"# The contract: reference of plugin API {API_VERSION}",
        "The promises between core and a plugin. Written by `hardpoint plugins api-reference`, which "
        "prints it for the installed version; `hardpoint plugins api-diff` prints what changed since an earlier one. "
        "The tutorial is `docs/write_a_plugin.md`.",
        "Within a major version the API only grows. A host of major N loads plugins of majors N and N-1.",
        *_interfaces(entries),
        *_manifest(),
        *_requirements(),
        *_families(),
        *_hooks(entries),
        *_ops(entries),
        *_layers(entries),
        *_names(entries),
    ]
    return "\n\n".join(parts) + "\n"


def _interfaces(entries: Mapping[str, Entry]) -> Iterator[str]:
    from hardpoint import CustomOp, PluggableLayer

    yield "## The interfaces by name"
    yield (
        "`from hardpoint import CustomOp, PluggableLayer, custom_op` imports them, and torch with them; `import "
        "hardpoint` alone imports no torch. All else that a plugin implements is in `hardpoint_plugin_api`."
    )
    yield "### `CustomOp`"
    yield _markdown(CustomOp.__doc__)
    yield f"* `bind`: {_inline(CustomOp.bind.__doc__)}"
    yield "### `PluggableLayer`"
    yield _markdown(PluggableLayer.__doc__)
    yield from _members("hardpoint.layers.PluggableLayer", PluggableLayer, entries)


def _manifest() -> Iterator[str]:
    yield f"## The manifest `{MANIFEST_NAME}`"
    yield (
        f"Schema {MANIFEST_SCHEMA}. It lies in the plugin's top-level package and is read as text, so that listing and "
        "locking import none of the plugin's code; explaining imports what wins. Unknown keys are refused."
    )
    for table, keys in KEYS.items():
        if table:
            yield f"### `{f'[[{table}]]' if table in ('device', 'contribution') else f'[{table}]'}`"
        yield _table(["key", "meaning"], [[f"`{key}`", meaning] for key, meaning in keys.items()])


def _requirements() -> Iterator[str]:
    yield "## Requirements"
    yield (
        "The entries of a contribution's `requires`: tables of one key each, all of which must hold. A value is a text "
        "or a number, or a list of them. A contribution that claims no `feature` has none."
    )
    everywhere = list(FAMILIES.values())
    rows = []
    for key, meaning in VOCABULARY.items():
        taken = [family.name for family in everywhere if applies(key, family)]
        rows.append([f"`{key}`", meaning, "all" if len(taken) == len(everywhere) else ", ".join(taken)])
    yield _table(["key", "meaning", "families"], rows)
    yield "Workload features, and the API version that each came with:"
    yield _table(["feature", "since"], [[f"`{feature}`", str(FEATURE_SINCE[feature])] for feature in Feature])


def _families() -> Iterator[str]:
    yield "## Families"
    yield (
        "`of` says which op, layer, architecture or method a contribution implements, where the family has such. The "
        "kinds of attention are listed: `--attention-backend NAME` chooses wherever that name is offered, and "
        "`--use attention.OF=NAME` in one of them. A contribution that leaves its `of` out is of the first."
    )
    yield _table(
        ["family", "what it is", "of", "workload", "chosen by", "state"],
        [
            [
                f"`{f.name}`",
                f.summary,
                ", ".join(f"`{kind.of}`" for kind in f.kinds) or ("yes" if f.has_of else ""),
                ", ".join(f"`{kind.__name__}`" for kind in f.kinds or (f.workload,)),
                f"`{f.flag}`" if f.flag else f"`--use {f.name}{'.OF' if f.has_of else ''}=NAME`",
                f.stability,
            ]
            for f in FAMILIES.values()
        ],
    )


def _hooks(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "## Hooks"
    yield _markdown(import_module(api.HookSpecs.__module__).__doc__)
    for name, spec in hooks().items():
        yield f"### `{name}{signature_of(entries[f'hook {name}'])}`"
        yield _markdown(spec.__doc__)


def _ops(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "## Ops"
    yield (
        "A pure function over tensors and keyword-only scalars. It changes no arguments beside those under *mutates*; "
        "an output may share memory with an input only where *may alias* says so. A `scalar` requirement may name the "
        "arguments under *static*. `hardpoint ops show NAME` prints the reference too."
    )
    for op in describe_all():
        yield f"### `{op.name}`"
        yield _block(_call(op.name, entries[f"op {op.name}"]))
        yield _markdown(op.doc)
        facts = [
            ["mutates", ", ".join(f"`{name}`" for name in op.mutates) or "nothing"],
            ["may alias", ", ".join(f"output {i}: `{name}`" for i, name in op.aliases) or "nothing"],
            ["static", ", ".join(f"`{name}`" for name in op.static) or "nothing"],
            ["errors", op.error_model],
            ["cases", ", ".join(op.cases)],
        ]
        yield "\n".join(f"* {key}: {value}" for key, value in facts)


def _layers(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "## Layers"
    yield (
        "A replacement subclasses `hardpoint.PluggableLayer` and is constructed as `Layer(ctx, args)`. It "
        "declares the slots of core's own, those of sub-layers under dotted names."
    )
    for name, cls in layer_classes().items():
        entry = entries[f"layer {name}"]
        yield f"### `{name}`"
        yield _markdown(cls.__doc__)
        yield f"Constructed with `{entry.get('args', '...')}`; `forward{signature_of(entry)}`: " + _inline(
            cls.forward.__doc__
        )


def _names(entries: Mapping[str, Entry]) -> Iterator[str]:
    yield "## Names of `hardpoint_plugin_api`"
    modules = {m: import_module(f"{api.__name__}.{m}") for m in _modules()}
    for module_name, module in modules.items():
        named = _assigned(module)
        public = [name for name in named if name in api.__all__]
        if not public:
            continue
        yield f"### {_TITLES.get(module_name, module_name)}"
        yield _markdown(module.__doc__)
        for name in public:
            value = getattr(api, name)
            yield f"#### `{name}`"
            yield _block(_headline(name, entries[name]))
            doc = value.__doc__ if isinstance(value, type) or inspect.isfunction(value) else named[name]
            if doc:
                yield _markdown(doc)
            if isinstance(value, type):
                yield from _members(name, value, entries)


def _modules() -> list[str]:
    found = [p.stem for p in sorted(Path(str(api.__file__)).parent.glob("*.py")) if not p.stem.startswith("_")]
    return sorted(found, key=lambda m: (list(_TITLES).index(m) if m in _TITLES else len(_TITLES), m))


def _assigned(module: ModuleType) -> dict[str, str]:
    """Names that a module's source defines at its top, in order, with the text that follows an assignment."""
    body = ast.parse(inspect.getsource(module)).body
    found: dict[str, str] = {}
    for node, after in zip(body, [*body[1:], None], strict=True):
        follows = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
        text = str(after.value.value) if follows else ""  # type: ignore[union-attr]  # narrowed by the line above
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found[node.name] = ""
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = text
        elif isinstance(node, ast.Assign):
            found |= {target.id: text for target in node.targets if isinstance(target, ast.Name)}
    return found


def _headline(name: str, entry: Entry) -> str:
    if entry["kind"] == "alias":
        return f"{name} = {' | '.join(entry['options'])}"
    if entry["kind"] == "enum":
        return f"enum {name}: " + ", ".join(f"{member} = {value!r}" for member, value in entry["members"].items())
    if entry["kind"] == "constant":
        return f"{name} = {entry['value']!r}" if "value" in entry else name
    if entry["kind"] == "function":
        return _call(name, entry)
    head = f"{entry['kind']} {name}"
    head = _call(head, {**entry, "returns": ""}) if "params" in entry else head
    return head + (f", a {', '.join(entry['bases'])}" if "bases" in entry else "")


def _members(path: str, cls: type, entries: Mapping[str, Entry]) -> Iterator[str]:
    lines = []
    for member, value in members_of(cls):
        entry = entries.get(f"{path}.{member}")
        if entry is None:
            continue
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        doc = _inline(function.__doc__) if inspect.isfunction(function) else ""
        if entry["kind"] == "method":
            head = f"{member}{signature_of(entry)}"
        else:
            head = f"{member}: {entry['type']}"
        must = " (to be implemented)" if entry.get("abstract") else ""
        lines.append(f"* `{head}`{must}" + (f": {doc}" if doc else ""))
    if lines:
        yield "\n".join(lines)


def _markdown(doc: str | None) -> str:
    """A docstring as Markdown: texts between two backticks need one."""
    return re.sub(r"``([^`]+)``", r"`\1`", inspect.cleandoc(doc or ""))


def _inline(doc: str | None) -> str:
    """A docstring as one paragraph."""
    return re.sub(r"\s+", " ", _markdown(doc))


def _block(text: str) -> str:
    return f"```text\n{text}\n```"


def _call(head: str, entry: Entry, width: int = 110) -> str:
    """``head(a, b) -> c``; one parameter a line where it is long."""
    line = head + signature_of(entry)
    if len(line) <= width:
        return line
    returns = f" -> {entry['returns']}" if entry.get("returns") else ""
    return "\n    ".join([f"{head}(", *(f"{p}," for p in entry["params"])]) + f"\n){returns}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return "\n".join([line(columns), "|---" * len(columns) + "|", *map(line, rows)])
