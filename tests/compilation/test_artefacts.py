"""Compiled pieces in a folder: compiled once, loaded by others, compiled again where they cannot be trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor

from hardpoint.compilation import artefacts, direct
from hardpoint.compilation.artefacts import Artefacts, check_private
from hardpoint.compilation.division import Divided, divide
from hardpoint.compilation.program import BoundProgram, PieceFunction
from hardpoint.compilation.tracing import trace
from hardpoint.ops.tracing import CannotCompileError, OpTracing
from hardpoint.parallel.groups import alone
from hardpoint_plugin_api import ConfigError, ForwardStep

Pass = Callable[[torch.Tensor, ForwardStep], torch.Tensor]
CPU = torch.device("cpu")


def scaled(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    """Operators on [T] and [T, 3]."""
    wide = ids[:, None].float() * torch.arange(3) + step.rotary_positions[:, None]
    return (wide.sin() + wide.shape[0]).view(-1, 3).transpose(0, 1).contiguous().t()


def divided(hidden: Pass, num_tokens: int = 61) -> Divided:
    return divide(trace(nn.Module(), hidden, OpTracing(), alone().tp, CPU, num_tokens))


@pytest.fixture
def compiling_few() -> Iterator[None]:
    """Without what pays for many pieces alone: a trial of the compiler for each set of vector instructions, and torch's
    headers compiled beforehand."""
    with inductor.patch({"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}):
        yield


@pytest.mark.usefixtures("compiling_few")
def test_a_piece_is_compiled_once_and_again_where_it_was_changed(tmp_path: Path) -> None:
    found = divided(scaled)
    (piece,) = found.pieces.values()
    first = Artefacts(tmp_path, "here")
    compiled = first.get(piece)
    assert (first.num_compiled, first.num_loaded) == (1, 0)
    second = Artefacts(tmp_path, "here")
    loaded = second.get(piece)
    assert (second.num_compiled, second.num_loaded) == (0, 1)
    for function in (compiled, loaded):
        bound = BoundProgram(found.program, found.constants, {piece.key: function}, lambda address: None)  # type: ignore[arg-type, return-value]  # no layer is called
        for count in (2, 7, 300):
            ids, positions = torch.arange(count), torch.arange(count) * 3
            step = ForwardStep(positions, positions, [], [])
            torch.testing.assert_close(bound.run(ids, step), scaled(ids, step))
    assert loaded_alone(tmp_path, piece.key) == {"found": 1, "programs": [], "inductor": []}
    changed = next(tmp_path.rglob("*.py"))
    changed.write_text(changed.read_text() + "\nraise SystemExit('run from a changed file')\n")
    assert not Artefacts(tmp_path, "here").load([piece.key])
    assert not Artefacts(tmp_path, "another torch").load([piece.key])


_LOADING = """
import json, sys
programs = []
sys.addaudithook(lambda event, args: programs.append(str(args[0])) if event == "subprocess.Popen" else None)
from pathlib import Path
from hardpoint.compilation.artefacts import Artefacts
found = Artefacts(Path(sys.argv[1]), "here").load([sys.argv[2]])
costly = ("torch._inductor.codecache", "torch._inductor.compile_fx", "torch._inductor.select_algorithm")
print(json.dumps({"found": len(found), "programs": programs, "inductor": [x for x in costly if x in sys.modules]}))
"""


def loaded_alone(folder: Path, key: str) -> dict[str, object]:
    """How many pieces a process of its own loads, the programs that it runs for that, and its imports of Inductor."""
    command = [sys.executable, "-c", _LOADING, str(folder), key]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, object] = json.loads(done.stdout)
    return found


def total(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.cumsum(0)


def product(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.cumprod(0)


def ordered(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.sort(descending=True).values


def test_pieces_are_loaded_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By Inductor, as of a GPU, and of operators that it calls as they are, so that no C++ is compiled. Each load waits
    for the others to begin."""
    monkeypatch.setattr(direct, "keep", lambda *args: False)
    passes = {hidden: divided(hidden) for hidden in (total, product, ordered)}
    pieces = [piece for found in passes.values() for piece in found.pieces.values()]
    for piece in pieces:
        Artefacts(tmp_path, "here").get(piece)
    load, barrier = artefacts._load, threading.Barrier(len(pieces), timeout=60)

    def meeting(entry: str, device: int | None) -> PieceFunction:
        barrier.wait()
        return load(entry, device)

    monkeypatch.setattr(artefacts, "_load", meeting)
    keys = [piece.key for piece in pieces]
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    for _ in range(2):  # a folder with the files of all is made, and found
        kept = Artefacts(tmp_path, "here")
        functions = kept.load([*keys, keys[0], "unknown"])
        assert (kept.num_loaded, kept.num_compiled, list(functions)) == (3, 0, keys)
        ids = torch.tensor([3, 1, 2, 7, 5])
        for hidden, found in passes.items():
            bound = BoundProgram(found.program, found.constants, functions, lambda address: None)  # type: ignore[arg-type, return-value]  # no layer is called
            step = ForwardStep(ids, ids, [], [])
            assert bound.run(ids, step).equal(hidden(ids, step))
    assert os.environ.get("TORCHINDUCTOR_CACHE_DIR") == before

    monkeypatch.setattr(artefacts, "_load", load)
    (shared,) = (path for path in tmp_path.glob("*/together-*") if path.is_dir())
    for changed in (next(shared.rglob("*.py")), next(tmp_path.rglob(f"{keys[0]}/piece/aotautograd/*/*"))):
        text = changed.read_bytes()
        changed.unlink()  # so that no other name of the file shows the change
        changed.write_bytes(text + b"\nraise SystemExit('run from a changed file')\n")
        functions = Artefacts(tmp_path, "here").load(keys)
        assert list(functions) == (keys if changed.is_relative_to(shared) else keys[1:])


def test_a_folder_that_others_may_write_to_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    Artefacts(folder, "here")
    folder.chmod(0o770)
    with pytest.raises(ConfigError, match=r"others can write to .*cache, .*chmod go-w"):
        Artefacts(folder, "here")
    folder.chmod(0o700)
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="others can write to"):
        check_private(folder)
    tmp_path.chmod(0o1777)  # as /tmp: only owners rename
    check_private(folder)


@pytest.mark.parametrize("mode", [0o700, 0o770], ids=oct)
def test_headers_are_compiled_beforehand_in_a_private_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int
) -> None:
    """That folder is of torch's choice, and has a name in /tmp that anybody can take first."""
    monkeypatch.setattr("torch._inductor.runtime.cache_dir_utils.default_cache_dir", lambda: str(tmp_path / "torch"))
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch").chmod(mode)
    with artefacts._cache_in(tmp_path / "cache", Artefacts(tmp_path / "kept", "here")._settings):
        assert inductor.cpp_cache_precompile_headers == (mode == 0o700)


def test_folders_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o002)  # of users who have a group of their own
    try:
        Artefacts(tmp_path / "cache" / "hardpoint" / "compiled", "here")
    finally:
        os.umask(before)
    for place in ("cache", "cache/hardpoint", "cache/hardpoint/compiled"):
        assert (tmp_path / place).stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--compile-cache .*file/cache: File exists"):
        Artefacts(tmp_path / "file" / "cache", "here")


def test_names_of_values_do_not_matter_and_numbers_do() -> None:
    def renamed(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return scaled(ids, step)

    def other(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
        return scaled(ids, step) + 2.0

    keys = [list(divided(each).pieces) for each in (scaled, renamed, other)]
    assert keys[0] == keys[1] != keys[2]
    assert keys[0] != list(divided(scaled, 1).pieces), "one token is a piece of its own"


def in_place(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.add_(1).float()


def by_values(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.nonzero().float()


def at_random(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return torch.rand(ids.shape[0])


def by_number(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.float() if ids.shape[0] > 16 else ids.float() + 1


def with_square(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return torch.zeros(ids.shape[0] * ids.shape[0]) + 1


def waiting(ids: torch.Tensor, step: ForwardStep) -> torch.Tensor:
    return ids.float() if int(ids.sum()) else -ids.float()


REFUSED: dict[Pass, str] = {
    in_place: "writes to a tensor in place",
    by_values: "asks for a tensor's values|cannot be traced",
    at_random: "draws random numbers",
    by_number: "takes another course for 2 tokens",
    with_square: "of the number of tokens",
    waiting: "cannot be traced",
}


@pytest.mark.parametrize("hidden", REFUSED, ids=lambda hidden: hidden.__name__)
def test_code_that_cannot_be_compiled_is_refused_with_the_reason(hidden: Pass) -> None:
    with pytest.raises(CannotCompileError, match=REFUSED[hidden]):
        divided(hidden)
