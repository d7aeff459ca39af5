"""cuBLASLt's algorithms by table: what a file says, who is refused, and on a device that all of them are right."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hardpoint_cuda import cublaslt, matmul_tables
from hardpoint_cuda.tuned_matmul import TunedMatmul
from hardpoint_plugin_api import ConfigError, DeviceInfo, LinearWorkload

ALGORITHM = bytes(range(64))
H200 = DeviceInfo(platform="cuda", name="NVIDIA H200", torch_type="cuda", arch="sm_90")


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = matmul_tables.path_of("NVIDIA H200", 130100, tmp_path)
    matmul_tables.write(path, {"bfloat16 6144x4096": {8192: ALGORITHM, 1024: None}})
    matmul_tables.write(path, {"bfloat16 4096x4096": {8192: None}})
    assert path.name == "device_name=NVIDIA_H200,cublaslt=130100.json"
    assert matmul_tables.read(path) == {
        "bfloat16 4096x4096": {8192: None},
        "bfloat16 6144x4096": {1024: None, 8192: ALGORITHM},
    }


@pytest.mark.parametrize(("m", "found"), [(1, 1024), (2800, 1024), (3000, 8192), (60_000, 8192)])
def test_the_nearest_number_of_rows(m: int, found: int) -> None:
    table = {1024: b"a" * 64, 8192: b"b" * 64}
    assert matmul_tables.nearest(table, m) == table[found]


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}', '{"schema": 1, "algorithms": {"a": {"8": "00"}}}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    (path := tmp_path / "damaged.json").write_text(text)
    with pytest.raises(ConfigError, match=r"damaged\.json is no table"):
        matmul_tables.read(path)


def test_every_table_that_is_shipped_can_be_read() -> None:
    for path in matmul_tables.DIRECTORY.glob("*.json"):
        assert matmul_tables.read(path)


def test_shapes_that_were_not_measured_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each with its reason."""
    monkeypatch.setattr(cublaslt, "version", lambda: 1)
    path = matmul_tables.path_of("NVIDIA H200", 1, tmp_path)
    monkeypatch.setattr("hardpoint_cuda.tuned_matmul.path_of", lambda device, version: path)
    matmul_tables.write(path, {"bfloat16 64x32": {1024: ALGORITHM}, "bfloat16 32x32": {1024: None}})

    def reasons(n: int) -> list[str]:
        workload = LinearWorkload(dtype="bfloat16", in_features=32, out_features=n)
        return [reason.message for reason in TunedMatmul.supports(workload, H200)]

    assert reasons(64) == []
    assert reasons(32) == ["cuBLAS's own choice is as fast"]
    assert reasons(16) == ["no algorithms were tuned for this weight here"]


@pytest.mark.skipif(torch.version.cuda is not None, reason="of torch without CUDA")
def test_without_the_library_the_reason_says_so() -> None:
    workload = LinearWorkload(dtype="bfloat16", in_features=32, out_features=32)
    assert [reason.code for reason in TunedMatmul.supports(workload, H200)] == ["library"]


class Calls:
    """Stands where the library stands, and notes what is called."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def called(*arguments: object) -> int:
            self.names.append(name)
            return 0

        return called


def test_a_product_that_goes_frees_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(cublaslt, "library", lambda: calls)
    monkeypatch.setattr(cublaslt, "_handle", lambda device: None)
    product = cublaslt.Product(3, 4, 5, torch.bfloat16, torch.device("cpu"))
    made = [name for name in calls.names if name.endswith("Create")]
    calls.names.clear()
    del product
    gc.collect()
    assert sorted(calls.names) == sorted(name.replace("Create", "Destroy") for name in made)
    assert len(made) == 4


@pytest.mark.accelerator
@pytest.mark.parametrize(("m", "n", "k"), [(1000, 512, 256), (4096, 1024, 2048), (33, 64, 128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_algorithm_makes_the_product(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    device = torch.device("cuda", 0)
    x, weight = (torch.randn(rows, k, device=device).to(dtype) for rows in (m, n))
    workspace = torch.empty(cublaslt.WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    product = cublaslt.Product(m, n, k, dtype, device)
    truth = (x.double() @ weight.double().t()).float()
    algorithms = product.candidates()
    assert algorithms
    for algorithm in algorithms:
        assert product.admits(algorithm)
        y = product.run(x, weight, cublaslt.prepared(algorithm), workspace)
        torch.testing.assert_close(y.float(), truth, rtol=0.02, atol=0.02 * float(truth.abs().max()))


def test_the_kit_is_given_sizes_that_have_algorithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewest rows of each weight, small products first; a weight without any is left out."""
    tables: dict[str, matmul_tables.Table] = {
        "bfloat16 6144x4096": {512: None, 8192: ALGORITHM, 2048: ALGORITHM},
        "bfloat16 4096x1024": {4096: ALGORITHM},
        "bfloat16 1024x3072": {4096: None},
    }
    monkeypatch.setattr(cublaslt, "version", lambda: 130100)
    path = matmul_tables.path_of("NVIDIA H200", 130100, tmp_path)
    monkeypatch.setattr("hardpoint_cuda.tuned_matmul.path_of", lambda device, version: path)
    matmul_tables.write(path, tables)
    assert TunedMatmul.trial_sizes(H200) == [(4096, 4096, 1024), (2048, 6144, 4096)]
