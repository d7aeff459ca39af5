"""Our own engine. Options are settings of EngineConfig; ``cpu.isa=avx2`` is the plugin cpu's setting ``isa``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import Worker, serve  # beside this file: workers run by path


class HardpointWorker(Worker):
    """LLM, in this process."""

    def load(self, model: str, threads: int, options: dict[str, Any]) -> None:
        from hardpoint import LLM
        from hardpoint.checkpoint.hf_config import HFConfig

        longest = min(2048, HFConfig.read(Path(model)).text.integer("max_position_embeddings"))
        plugins: dict[str, dict[str, Any]] = {"cpu": {"threads": threads}}
        settings = {"platform": "cpu", "plugin_config": plugins, "max_model_len": longest}
        settings |= {"wait_for_kernels": True, "wait_for_graphs": True}
        for key, value in options.items():
            plugin, dot, name = key.rpartition(".")
            (plugins.setdefault(plugin, {}) if dot else settings)[name] = value
        self._llm = LLM(model=model, enable_prefix_caching=False, max_num_seqs=64, **settings)

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        from hardpoint import SamplingParams

        self._llm.generate(
            [list(prompt) for prompt in prompts], SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        )

    def logprobs(self, prompt: Sequence[int], top: int) -> dict[int, float]:
        from hardpoint import SamplingParams

        (result,) = self._llm.generate([list(prompt)], SamplingParams(temperature=0, max_tokens=1, logprobs=top))
        (likeliest,) = result.outputs[0].logprobs or ()
        return {token: entry.logprob for token, entry in likeliest.items()}

    def version(self) -> str:
        from importlib.metadata import version

        return version("hardpoint-core")


if __name__ == "__main__":
    serve(HardpointWorker())
