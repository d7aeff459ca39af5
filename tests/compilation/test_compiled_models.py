"""Models whose forward pass was traced and divided, against Transformers' own runs of the same code.

Inductor takes seconds for each piece. Here pieces run as the graphs that it would get, but in the nightly test.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.compilation.artefacts import Artefacts
from hardpoint.compilation.compiled import CompiledPass
from hardpoint.compilation.division import PieceGraph
from hardpoint.compilation.program import Call, PieceFunction, Program
from hardpoint.models.transformers_code.model import TransformersLM
from tests.support.checkpoints import check_tokens_equal, random_prompts, reference_logits, write_checkpoint
from tests.support.engines import counted, prompt_logits, small_llm
from tests.support.transformers_models import write_tiny

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
TOLERANCE = 1e-4
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {},
    "cohere2": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "bloom": {},
    "deepseek_v3": {},
    "olmo2": {},
    "falcon": {},
}
_QUICK = ("gpt2", "qwen3_moe")
"""Of ``KINDS``; the others are for the night."""


@pytest.fixture
def graphs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces run as graphs, without Inductor."""

    def compile_nothing(self: Artefacts, piece: PieceGraph) -> PieceFunction:
        self.num_compiled += 1
        return piece.graph

    monkeypatch.setattr(Artefacts, "_compile", compile_nothing)


def compiled_llm(folder: Path, cache: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 128, "model_impl": "transformers", "compile": True} | settings
    return small_llm(folder, compile_cache=str(cache), **settings)


def compiled_pass(llm: LLM) -> CompiledPass:
    found = cast(TransformersLM, llm.core.blueprint.model).compiled
    assert found is not None
    return found


def pieces(llm: LLM) -> dict[str, float]:
    """How many pieces of the model were compiled, and how many were loaded."""
    samples = [sample for family in llm.metrics.families for sample in family.samples]
    return {s.labels["source"]: s.value for s in samples if s.name == "hardpoint_compiled_pieces_total"}


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def check(llm: LLM, model: Any) -> None:
    """Compare logits with ``model``, in one chunk and in several, and greedy tokens of several requests and of one."""
    (prompt,) = random_prompts(1, 60, seed=1, shortest=60)
    expected = reference_logits(model, prompt)
    for chunk in (None, 8):
        difference = (prompt_logits(llm, prompt, chunk) - expected).abs().max()
        assert difference < TOLERANCE, f"chunk {chunk}: logits differ by {difference:.2e}"
    for prompts in (random_prompts(4, 40, seed=2), random_prompts(1, 5, seed=3)):
        for each, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, each, output.outputs[0].token_ids, TOLERANCE)
    assert counted(llm)["graph_replays_total"] > 8, "pieces stand in captured steps"


@pytest.mark.usefixtures("graphs_alone")
@pytest.mark.parametrize(
    "kind", [kind if kind in _QUICK else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_divided_passes_give_the_same_tokens(kind: str, tmp_path: Path) -> None:
    model = write_tiny(tmp_path / kind, kind, **KINDS[kind])
    with compiled_llm(tmp_path / kind, tmp_path / "cache") as llm:
        assert len(compiled_pass(llm)._bound) == 2, "passes for one token and for several"
        check(llm, model)


@pytest.mark.usefixtures("graphs_alone")
def test_equal_layers_share_pieces_and_calls_are_their_names_alone(tmp_path: Path) -> None:
    found: dict[int, Program] = {}
    for layers in (2, 4):
        folder = tmp_path / str(layers)
        write_checkpoint(folder, "llama", num_hidden_layers=layers)
        with compiled_llm(folder, tmp_path / "cache") as llm:
            found[layers] = compiled_pass(llm)._made[False][0]
    assert found[4].keys == found[2].keys, "more layers are no more pieces"
    addresses = [step.address for step in found[4].steps if isinstance(step, Call)]
    assert len(set(addresses)) == len(addresses) == 1 + 4 * 5, "embedding; qkv, attention, output, gate-up and down"
    written = json.loads(json.dumps(found[4].as_json()))
    stored = [each for each in map(_read, (tmp_path / "cache").rglob("*.json")) if each == written]
    assert len(stored) == 1
    assert Program.of_json(stored[0]) == found[4]


@pytest.mark.usefixtures("graphs_alone")
def test_new_weights_are_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "first", "llama", num_hidden_layers=1)
    model = write_checkpoint(tmp_path / "second", "llama", num_hidden_layers=1, seed=5)
    with compiled_llm(tmp_path / "first", tmp_path / "cache") as llm:
        llm.update_weights(str(tmp_path / "second"))
        check(llm, model)


@pytest.mark.usefixtures("graphs_alone")
def test_a_stored_program_of_another_model_is_not_taken(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    with compiled_llm(tmp_path / "llama", tmp_path / "cache") as llm:
        compiled = compiled_pass(llm)
        program = compiled._made[False][0]
        text = json.dumps(program.as_json())
        assert compiled._fitting(json.loads(text)) == program
        for name in ("self_attn.q_proj", "input_layernorm", '"kind"'):
            assert name in text
            assert compiled._fitting(json.loads(text.replace(name, f"{name[:-1]}x{name[-1]}"))) is None


def test_enforce_eager_turns_off_compilation_and_graphs(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=1)
    with compiled_llm(tmp_path / "llama", tmp_path / "cache", enforce_eager=True) as llm:
        llm.generate(random_prompts(2, 10, seed=1), GREEDY, use_tqdm=False)
        assert not counted(llm).get("graph_replays_total")
        assert not pieces(llm)
    assert not (tmp_path / "cache").exists()


def test_own_code_says_that_it_is_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_checkpoint(tmp_path / "llama", "llama")
    with caplog.at_level(logging.WARNING), compiled_llm(tmp_path / "llama", tmp_path / "cache", model_impl="auto"):
        assert "--compile has no effect" in caplog.text
    assert not (tmp_path / "cache").exists()


_STARTING = """
import json, sys
from pathlib import Path
programs = []
sys.addaudithook(lambda event, args: programs.append(str(args[0])) if event == "subprocess.Popen" else None)
from tests.compilation.test_compiled_models import GREEDY, compiled_llm, pieces
with compiled_llm(Path(sys.argv[1]), Path(sys.argv[2])) as llm:
    llm.generate(["a", "b"], GREEDY, use_tqdm=False)
    inductor = [name for name in ("torch._inductor.codecache", "torch._inductor.compile_fx") if name in sys.modules]
    compilers = [name for name in programs if "ldconfig" not in name]
    print(json.dumps([pieces(llm), inductor, compilers]))
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_compiled_passes_give_the_same_tokens_and_a_second_start_compiles_nothing(kind: str, tmp_path: Path) -> None:
    folder, cache = tmp_path / kind, tmp_path / "cache"
    model = write_checkpoint(folder, "llama") if kind == "llama" else write_tiny(folder, kind)
    for start in range(2):
        with compiled_llm(folder, cache) as llm:
            found = pieces(llm)
            assert (found["compiled"] > 0, found["loaded"] > 0) == ((True, False), (False, True))[start]
            check(llm, model)
    command = [sys.executable, "-c", _STARTING, str(folder), str(cache)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    counts, inductor, programs = json.loads(done.stdout)
    assert counts == {"compiled": 0, "loaded": found["loaded"]}
    assert not inductor, "a later start imports no compiler"
    assert not programs, "and runs none"


@pytest.mark.nightly
def test_two_ranks_of_twenty_equal_layers_share_pieces(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path / "llama", "llama", num_hidden_layers=20)
    prompts = random_prompts(4, 40, seed=2)
    with compiled_llm(tmp_path / "llama", tmp_path / "cache", tensor_parallel_size=2) as llm:
        for each, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
            check_tokens_equal(model, each, output.outputs[0].token_ids, TOLERANCE)
    kept = list((tmp_path / "cache").rglob("hashes.json"))
    assert len({path.parent.name for path in kept}) == len(kept) <= 14
