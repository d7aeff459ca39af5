"""Every causal language model of the installed Transformers, by its own code in this engine; writes the table of docs.

``python -m tests.models.test_transformers_sweep`` writes docs/transformers_models.md.
"""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import transformers

from hardpoint import SamplingParams
from hardpoint.models.transformers_code.model import TransformersLM
from hardpoint_plugin_api import HardpointError
from tests.support.checkpoints import check_tokens_equal, random_prompts
from tests.support.engines import counted, small_llm
from tests.support.transformers_models import causal_kinds, write_tiny

PAGE = Path(__file__).parents[2] / "docs" / "transformers_models.md"
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
MUST_RUN = 40
HEAD = """# Models by Transformers' code

Each row is one causal language model of Transformers {version}: a tiny one with random weights, in float32 on a CPU.
"runs": sixteen greedy tokens of five prompts in one batch equal those of Transformers' own run of the same model. The
second column counts the layers of Hardpoint in it, the calls of attention and the decoder layers that run as fused ops,
and names the classes that stay as they are.
`python -m tests.models.test_transformers_sweep` writes this page. How it works:
[running.md](running.md#models-by-transformers-code).

"""


@dataclass(frozen=True)
class Verdict:
    """``runs`` with what was replaced, or the reason against."""

    kind: str
    name: str
    runs: bool
    text: str


def tried(kind: str, name: str, folder: Path) -> Verdict:
    """Run a tiny model of this type."""
    try:
        model = write_tiny(folder, kind)
    except Exception as error:  # configs of a hundred types
        first = f"{type(error).__name__}: {error}".splitlines()[0]
        return Verdict(kind, name, False, f"not tried: no tiny config ({first:.120})")
    try:
        with small_llm(folder, max_model_len=64, model_impl="transformers", kv_cache_memory="8MiB") as llm:
            report = cast(TransformersLM, llm.core.blueprint.model).report
            prompts = random_prompts(5, 40, seed=2)
            for prompt, output in zip(prompts, llm.generate(prompts, GREEDY, use_tqdm=False), strict=True):
                check_tokens_equal(model, prompt, output.outputs[0].token_ids)
            replaced = ", ".join(f"{count} {layer}" for layer, count in report.replaced.items())
            counts = ", ".join(f"{count} {name}" for name, count in report.fused.items() if count)
            fused = f"; fused: {counts}" if counts else ""
            stays = f"; stay: {', '.join(report.kept)}" if report.kept else ""
            eager = "" if counted(llm).get("graph_replays_total") else "; steps are not captured"
            return Verdict(kind, name, True, f"{replaced}{fused}{stays}{eager}")
    except HardpointError as error:
        reason = str(error).rpartition("cannot run by Transformers' code: ")[2].replace(f"{folder}/", "")
        return Verdict(kind, name, False, reason.splitlines()[0][:200])
    except (AssertionError, Exception) as error:
        return Verdict(kind, name, False, f"fails: {type(error).__name__}: {str(error).splitlines()[0]:.160}")


def table(verdicts: list[Verdict]) -> str:
    """The page of docs."""
    runs = [v for v in verdicts if v.runs]
    others = [v for v in verdicts if not v.runs]
    lines = [
        HEAD.format(version=transformers.__version__),
        f"## The {len(runs)} that run\n\n| model | layers |\n|---|---|\n",
    ]
    lines += [f"| {v.name} (`{v.kind}`) | {v.text} |\n" for v in runs]
    lines += [f"\n## The {len(others)} that do not\n\n| model | reason |\n|---|---|\n"]
    lines += [f"| {v.name} (`{v.kind}`) | {v.text.replace('|', '/')} |\n" for v in others]
    return "".join(lines)


def all_tried() -> list[Verdict]:
    """Every model type, each with a folder of its own."""
    verdicts = []
    for kind, name in causal_kinds().items():
        with tempfile.TemporaryDirectory() as folder:
            verdicts.append(tried(kind, name, Path(folder)))
    return verdicts


@pytest.mark.nightly
def test_every_model_that_the_page_lists_runs() -> None:
    page = PAGE.read_text(encoding="utf-8").partition("that do not")[0]
    listed = re.findall(r"^\| \w+ \(`(.+)`\) \|", page, re.MULTILINE)
    assert len(listed) >= MUST_RUN
    verdicts = {verdict.kind: verdict for verdict in all_tried()}
    broken = [f"{kind}: {verdict.text}" for kind, verdict in verdicts.items() if verdict.text.startswith("fails")]
    lost = [f"{kind}: {verdicts[kind].text}" for kind in listed if kind in verdicts and not verdicts[kind].runs]
    assert not broken + lost, "\n".join(broken + lost)


if __name__ == "__main__":
    PAGE.write_text(table(all_tried()), encoding="utf-8")
