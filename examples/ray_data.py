"""Batch inference over a data set by Ray Data: each actor of a pool has an engine of its own.

    pip install 'hardpoint-core[ray]' 'ray[data]'
    python examples/ray_data.py

``num_gpus=1`` in ``map_batches`` gives each engine a GPU. Ray restarts an actor that dies, and repeats its batch.
"""

from __future__ import annotations

from typing import Any

import ray

from hardpoint import LLM, SamplingParams

PROMPTS = ["It is a truth", "The quick brown", "In the beginning", "Call me"] * 4


class Continue:
    """Adds ``text`` to a batch of rows with a ``prompt`` each."""

    def __init__(self) -> None:
        self.llm = LLM("demo")

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        params = SamplingParams(temperature=0, max_tokens=12)
        outputs = self.llm.generate(list(batch["prompt"]), params, use_tqdm=False)
        return {"prompt": batch["prompt"], "text": [output.outputs[0].text for output in outputs]}


if __name__ == "__main__":
    data = ray.data.from_items([{"prompt": prompt} for prompt in PROMPTS])
    for row in data.map_batches(Continue, concurrency=1, batch_size=8).iter_rows():
        print(f"{row['prompt']!r}: {row['text']!r}")
