"""Transformers' own model code, eager, with a static batch and its default cache. Option: ``device``, torch's name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from protocol import Worker, serve  # beside this file: workers run by path


class TransformersWorker(Worker):
    """AutoModelForCausalLM.generate."""

    def load(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        self._device = torch.device(options.get("device", "cpu"))
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval().to(self._device)
        self._model.generation_config.eos_token_id = None

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        import torch

        ids = torch.tensor([list(prompt) for prompt in prompts], device=self._device)
        with torch.inference_mode():
            self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
            )

    def logprobs(self, prompt: Sequence[int], top: int) -> dict[int, float]:
        import torch

        with torch.inference_mode():
            logits = self._model(torch.tensor([list(prompt)], device=self._device)).logits[0, -1].float()
        values, ids = logits.log_softmax(-1).topk(top)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    def version(self) -> str:
        from importlib.metadata import version

        return version("transformers")


if __name__ == "__main__":
    serve(TransformersWorker())
