"""Continue several prompts in one batch. For vLLM, only the import line and `platform` would be different."""

from hardpoint import LLM, SamplingParams

prompts = [
    "It is a truth universally acknowledged, that",
    "The whale",
    "Mr. Sherlock Holmes, who was",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32, seed=1)

llm = LLM(model="demo", platform="cpu")
for output in llm.generate(prompts, sampling_params):
    print(f"Prompt: {output.prompt!r}, generated: {output.outputs[0].text!r}")
