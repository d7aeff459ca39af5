"""A plugin's kernel that returns something else than its interface asks for is named, wherever it is first called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hardpoint import SamplingParams
from hardpoint.kernel_results import check_result
from hardpoint.plugin_host import discover
from hardpoint_plugin_api import HardpointError, PluginLoadError
from tests.out_of_tree.build import Dist, importable, install
from tests.support.checkpoints import write_checkpoint
from tests.support.engines import small_llm

_KERNELS = """
import torch
from hardpoint.reference.attention import ReferenceAttention
from hardpoint_plugin_api import LinearKernel

def nothing(x, weight, *, eps):
    return None

def wide(x, weight, *, eps):
    return torch.cat([x, x], dim=-1)

def halved(x, weight, *, eps):
    return x.to(torch.bfloat16)

class Nothing(LinearKernel):
    def apply(self, call):
        return None

class Narrow(LinearKernel):
    def apply(self, call):
        return torch.nn.functional.linear(call.x, call.weights["weight"], call.bias)[:, 1:]

class Planless(ReferenceAttention):
    def plan(self, batch):
        return None
"""

_REQUIRES = {
    "op": '{ dtype = ["float32"] }',
    "linear": '{ spec = ["float32/float32"] }',
    "attention": '{ dtype = ["float32"] }',
}

Put = Callable[[str, str], None]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, "llama")
    return folder


@pytest.fixture
def put(tmp_path: Path) -> Iterator[Put]:
    """Installs a plugin of one kernel, which comes before all others."""
    site, wheels = tmp_path / "site", tmp_path / "wheels"
    site.mkdir()
    wheels.mkdir()

    def install_kernel(slot: str, kernel: str) -> None:
        family, _, of = slot.partition(".")
        layout = 'layout = "plain"\n' if family == "attention" else ""
        manifest = (
            f'schema = 1\napi = "0.2"\n[plugin]\nname = "odd"\n[[contribution]]\nfamily = "{family}"\nname = "odd"\n'
            f'target = "hp_odd.kernels:{kernel}"\npriority = 1000\nrequires = [{_REQUIRES[family]}]\n{layout}'
        ) + (f'of = "{of}"\n' if of else "")
        files = {"__init__.py": "", "plugin.py": "", "kernels.py": _KERNELS, "hardpoint.toml": manifest}
        install(
            [Dist("odd-hp", {f"hp_odd/{n}": text for n, text in files.items()}, {"odd": "hp_odd.plugin"})], site, wheels
        )

    with importable(site):
        yield install_kernel


@pytest.mark.parametrize("enforce_eager", [True, False], ids=["eager", "prepared"])
@pytest.mark.parametrize(
    ("slot", "kernel", "said"),
    [
        ("op.rms_norm", "nothing", r"returned NoneType from rms_norm\(\), where the interface asks for float32 \["),
        ("op.rms_norm", "wide", r"returned float32 \[\d+, 128\] from rms_norm\(\), where .* float32 \[\d+, 64\]"),
        ("op.rms_norm", "halved", r"returned bfloat16 \["),
        ("linear", "Nothing", r"returned NoneType from apply\(\), where the interface asks for float32 \["),
        ("linear", "Narrow", r"returned float32 \[\d+, \d+\] from apply\(\)"),
        ("attention", "Planless", r"returned None from plan\(\), where the interface asks for AttentionMetadata"),
    ],
)
def test_an_odd_result_names_its_plugin(
    slot: str, kernel: str, said: str, enforce_eager: bool, model: Path, put: Put
) -> None:
    put(slot, kernel)
    with (
        pytest.raises(HardpointError, match=rf"plugin odd: .*{said}"),
        small_llm(model, dtype="float32", enforce_eager=enforce_eager) as llm,
    ):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4), use_tqdm=False)


def test_results_are_compared_by_form() -> None:
    offer = next(iter(discover().offers("linear", None)))
    x = torch.zeros(2, 3)
    check_result(offer, "f", (x, x.int()), (x + 1, x.int()))
    for result in (x, (x, x), None, (x.int(), x)):
        with pytest.raises(PluginLoadError, match=r"from f\(\), where the interface asks for float32 \[2, 3\], int32"):
            check_result(offer, "f", result, (x, x.int()))
