"""Which of Inductor's modules are kept as a function and its kernels, and which need more of Inductor.

``test_artefacts.py`` compiles real pieces; the modules here have the form of those.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hardpoint.compilation import direct

MODULE = """
import torch
from math import inf, nan
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.select_algorithm import extern_kernels
empty_strided_cpu = torch._C._dynamo.guards._empty_strided_cpu
async_compile = AsyncCompile()

cpp_fused_0 = async_compile.cpp_pybinding(['float*'], r'''void kernel(float* x);''')

class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        args.clear()
        s7 = arg0_1
        buf0 = empty_strided_cpu((s7, ), (1, ), torch.float32)
        {step}
        return (buf0, )
"""
CASES = {
    "torch": ("buf0.fill_(inf).add_(arg1_1)", True),
    "a kernel whose object is missing": ("cpp_fused_0(buf0)", False),
    "a kernel of Inductor's": ("extern_kernels.mm(arg1_1, arg1_1, out=buf0)", False),
    "Inductor within torch": ("torch._inductor.runtime.run(buf0)", False),
    "a kernel in another language": ("triton_poi_0.run(buf0, stream=stream0)", False),
    "a return of its own": ("if s7 > 1: return (buf0, )", False),
    "its other parts": ("self.partitions[0]([buf0])", False),
}


def written(folder: Path, step: str) -> Path:
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "cab.py").write_text(MODULE.replace("{step}", step))
    return folder


@pytest.mark.parametrize("case", CASES)
def test_modules_that_need_torch_alone_are_kept(case: str, tmp_path: Path) -> None:
    step, is_kept = CASES[case]
    made, folder = written(tmp_path / "made", step), tmp_path / "direct"
    assert direct.keep(made, folder, 2, 1) == is_kept == folder.exists()
    if is_kept:
        assert "_inductor" not in (folder / "call.py").read_text()
        (found,) = direct.load(folder)(3, torch.zeros(3))
        assert found.equal(torch.full((3,), torch.inf))


@pytest.mark.parametrize("sizes", [(1, 1), (3, 1), (2, 2)], ids=str)
def test_other_numbers_of_inputs_or_outputs_than_the_pieces_are_refused(sizes: tuple[int, int], tmp_path: Path) -> None:
    made = written(tmp_path / "made", CASES["torch"][0])
    assert not direct.keep(made, tmp_path / "direct", *sizes)
    assert not (tmp_path / "direct").exists()
