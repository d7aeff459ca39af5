"""The distributions that the tests install: what they claim, and what is wrong with them."""

from __future__ import annotations

import json

from tests.out_of_tree.build import Dist

NO_HOOKS = ""
HOOK = "from hardpoint_plugin_api import hookimpl, ConfigChange\n\n@hookimpl\n"


def contribution(family: str, name: str, *, requires: str = "[]", **values: object) -> str:
    """One contribution as TOML; ``requires`` is TOML itself."""
    values = {"family": family, "name": name, "target": "kit.ops:reference"} | values
    lines = [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(["[[contribution]]", *lines, f"requires = {requires}", ""])


def plugin(
    name: str,
    *contributions: str,
    hooks: str = NO_HOOKS,
    claims: str | None = None,
    schema: int = 1,
    api: str = "0.2",
    after: tuple[str, ...] = (),
    more: str = "",
    **modules: str,
) -> Dist:
    """A plugin in a package and distribution of its own; ``claims`` is the manifest's name where that differs.

    ``hooks`` is the source of its hook module, ``more`` further TOML, ``modules`` further source files.
    """
    package = f"hp_{name}"
    head = f'schema = {schema}\napi = "{api}"\n[plugin]\nname = "{claims or name}"\nafter = {json.dumps(list(after))}\n'
    sources = {"__init__": "", "plugin": hooks, **modules}
    files = {f"{package}/{module}.py": source for module, source in sources.items()}
    files[f"{package}/hardpoint.toml"] = "\n".join([head, more, *contributions])
    return Dist(f"{name.replace('_', '-')}-hardpoint", files, {name: f"{package}.plugin"})


def preset(name: str) -> str:
    """One device preset as TOML."""
    return f'[[device]]\nname = "{name}"\nplatform = "cpu"\narch = "toy"\n'


def without_manifest(name: str) -> Dist:
    """A plugin whose author forgot to ship the manifest."""
    return Dist(f"{name}-hardpoint", {f"hp_{name}/__init__.py": ""}, {name: f"hp_{name}"})


KIT = plugin(
    "kit",
    contribution("op", "reference", of="kit_norm", target="hp_kit.ops:norm"),
    contribution("op", "kit_fast", of="kit_norm", target="hp_kit.ops:Norms.fast", priority=5),
    contribution("layer", "default", of="kit_block", target="hp_kit.ops:Norms"),
    more='[config.tile]\ntype = "int"\ndefault = 8\n' + preset("kit-1"),
    ops="def norm(x): return x\n\nclass Norms:\n    @staticmethod\n    def fast(x): return x\n",
)
"""A sound plugin: declares an op and a layer, and offers a faster op."""

SOUND = [
    KIT,
    plugin(
        "fewer", hooks=HOOK + "def hardpoint_configure(device):\n    return [ConfigChange('seed', 1, device.name)]\n"
    ),
    plugin("slow", hooks="import time; time.sleep(1.1)\n"),
    plugin("last", after=("kit", "middle", "absent")),
    plugin("middle", after=("zebra",)),
    plugin("zebra"),
    plugin("shadowed"),
    plugin(
        "scout",
        contribution("platform", "scout", target="hp_scout.platform:Scout"),
        platform="from hardpoint_plugin_api import NO_DEVICE, Platform, Reason\n\n"
        "class Scout(Platform):\n    name = 'scout'\n\n    @classmethod\n    def detect(cls):\n"
        "        return Reason(NO_DEVICE, 'there is none')\n\n"
        "    def activate(self, index): ...\n    def synchronize(self): ...\n    memory = property(activate)\n",
    ),
    Dist("vendor-kernels", {"vendor_lib/__init__.py": "def paged(): ...\n"}, {}),
    plugin(
        "adapter",
        contribution(
            "linear",
            "has",
            target="hp_adapter:__name__",
            requires='[{ symbol = "vendor_lib:paged", from = "vendor-kernels" }]',
        ),
        contribution(
            "linear",
            "lacks",
            target="hp_adapter:__name__",
            requires='[{ symbol = "vendor_lib:page", from = "vendor-kernels" }]',
        ),
    ),
]

UNREADABLE = [
    plugin("newer_api", api="9.1"),
    plugin("newer_schema", schema=2),
    plugin("malformed", more="[[contribution\n"),
    plugin("unknown_key", contribution("linear", "q", requires='[{ moon_phase = ["full"] }]')),
    without_manifest("bare"),
    Dist("object-hardpoint", {"hp_object/__init__.py": ""}, {"object": "hp_object:Plugin"}),
    Dist("absent-hardpoint", {"hp_other/__init__.py": ""}, {"absent_module": "hp_absent.plugin"}),
]

CONFLICTING = [
    plugin("twin_a", claims="twin"),
    plugin("twin_b", claims="twin"),
    plugin("impostor", claims="core"),
    plugin("left", contribution("op", "same", of="kit_norm")),
    plugin("right", contribution("op", "same", of="kit_norm")),
    plugin("here", contribution("op", "alike", of="kit_norm", platforms=["here", "both"])),
    plugin("there", contribution("op", "alike", of="kit_norm", platforms=["there"])),
    plugin("everywhere", contribution("op", "alike", of="kit_norm", platforms=["there", "both"])),
    plugin("heir_a", contribution("op", "heir_a", of="kit_norm", replaces="reference")),
    plugin("heir_b", contribution("op", "heir_b", of="kit_norm", replaces="reference")),
    plugin("on_heir", contribution("op", "on_heir", of="kit_norm", replaces="heir_a")),
    plugin("on_on_heir", contribution("op", "on_on_heir", of="kit_norm", replaces="on_heir")),
    plugin("squatter", contribution("attention", "reference"), contribution("linear", "squatted")),
    plugin("twice", contribution("linear", "q"), contribution("linear", "q")),
    plugin("preset_a", more=preset("toy")),
    plugin("preset_b", more=preset("toy")),
    plugin("op_as_layer", contribution("layer", "mine", of="kit_norm")),
    plugin("layer_as_op", contribution("op", "mine", of="mlp")),
    plugin("new_op", contribution("op", "reference", of="thing")),
    plugin("new_layer", contribution("layer", "default", of="thing")),
    plugin("misspelt_op", contribution("op", "mine", of="kit_nrom")),
    plugin("misspelt_layer", contribution("layer", "mine", of="kit_blok")),
    plugin("misspelt_replaces", contribution("op", "mine", of="kit_norm", replaces="kit_fats")),
    plugin("doomed_left", contribution("op", "same", of="kit_norm"), contribution("op", "mine", of="kit_nrom")),
    plugin("ring_a", after=("ring_b",)),
    plugin("ring_b", after=("ring_c",)),
    plugin("ring_c", after=("ring_a",)),
    plugin("ring_guest", after=("ring_a",)),
    plugin("own_tail", after=("own_tail",)),
]

BROKEN = [
    plugin("raises", contribution("linear", "of_raises"), hooks="raise RuntimeError('boom')\n"),
    plugin("exits", hooks="raise SystemExit(3)\n"),
    plugin("lacks_vendor", hooks="import a_vendor_library\n"),
    plugin("wrong_arguments", hooks=HOOK + "def hardpoint_configure(config, devise): ...\n"),
    plugin("unknown_hook", hooks=HOOK + "def hardpoint_engine_startet(engine): ...\n"),
    plugin("unmarked", hooks="def hardpoint_engine_started(engine): ...\n"),
    plugin("with_default", hooks=HOOK + "def hardpoint_configure(config, device=None): ...\n"),
    plugin(
        "one_good_hook",
        hooks=HOOK + "def hardpoint_engine_started(engine): raise AssertionError('registered')\n\n\n"
        "@hookimpl\ndef hardpoint_engine_halting(engine): ...\n",
    ),
    plugin("configure_raises", hooks=HOOK + "def hardpoint_configure(config): raise KeyError('tile')\n"),
    plugin("configure_exits", hooks=HOOK + "def hardpoint_configure(config): raise SystemExit(0)\n"),
    plugin("a_started_exits", hooks=HOOK + "def hardpoint_engine_started(): raise SystemExit(0)\n"),
    plugin("configure_answers", hooks=HOOK + "def hardpoint_configure(): return {'seed': 1}\n"),
    plugin("a_started_raises", hooks=HOOK + "def hardpoint_engine_started(): raise RuntimeError('boom')\n"),
    plugin(
        "listener",
        hooks=HOOK.replace("@hook", "heard = []\n\n@hook")
        + "def hardpoint_engine_started(engine): heard.append(engine.model)\n\n"
        + "@hookimpl\ndef hardpoint_engine_stopping(): heard.append('stopping')\n",
    ),
    plugin(
        "eager",
        contribution("linear", "q", target="hp_eager.method:METHOD"),
        method="from hardpoint_plugin_api import FromTheFuture as METHOD\n",
    ),
    plugin(
        "fails_in_steps",
        contribution("op", "failing", of="rms_norm", target="hp_fails_in_steps.ops:norm", priority=1000),
        ops="def norm(x, weight, *, eps):\n    raise ValueError('not a multiple of 16')\n",
    ),
    plugin(
        "wrong_signature",
        contribution("op", "wrong", of="rms_norm", target="hp_wrong_signature.ops:norm", priority=1000),
        ops="def norm(x): return x\n",
    ),
    plugin(
        "narrow",
        contribution("linear", "narrow", target="hp_narrow.kernels:Narrow", priority=1000),
        kernels="from hardpoint.reference.linear import PlainLinear\n\n\n"
        "class Narrow(PlainLinear):\n    def apply(self, x, weights, bias):\n        return x @ weights['weight'].T\n",
    ),
    plugin(
        "fails_to_pack",
        contribution("linear", "packing", target="hp_fails_to_pack.kernels:Packing", priority=1000),
        kernels="from hardpoint.reference.linear import PlainLinear\n\n\n"
        "class Packing(PlainLinear):\n    def prepack(self, weights):\n        raise KeyError('tile')\n",
    ),
    plugin(
        "fails_to_limit",
        contribution("attention", "limits", target="hp_fails_to_limit.kernels:Limits", priority=1000),
        kernels="from hardpoint.reference.attention import ReferenceAttention\n\n\n"
        "class Limits(ReferenceAttention):\n    def step_limits(self):\n        return undefined_name\n",
    ),
    plugin(
        "targets",
        contribution("linear", "no_module", target="hp_targets.nowhere:Method"),
        contribution("linear", "no_attribute", target="hp_targets.methods:Methods.fastt"),
        contribution("linear", "raising", target="hp_targets.broken:Method"),
        contribution("linear", "good", target="hp_targets.methods:Methods.fast"),
        methods="class Methods:\n    fast = 'fast'\n",
        broken="with open(__file__ + '.tries', 'a') as tries: tries.write('x')\nraise OSError('no driver')\n",
    ),
]

ALL = {
    dist.name.removesuffix("-hardpoint").replace("-", "_"): dist
    for dist in [*SOUND, *UNREADABLE, *CONFLICTING, *BROKEN]
}
