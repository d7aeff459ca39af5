"""The cost of quantization in quality: a model's loss on a text, by method, beside that of the model unquantized."""

from __future__ import annotations

from pathlib import Path

import click

from hardpoint import LLM, SamplingParams
from hardpoint.bench.registry import BenchResult, BenchRow, benchmark
from hardpoint.checkpoint.source import demo_model, resolve_model
from hardpoint.config import EngineConfig
from hardpoint.engine.blueprint import draw
from hardpoint_plugin_api import ConfigError

_METHODS = (
    "fp8",
    "fp8:scales=tensor",
    "fp8:scales=block",
    "fp8:activations=none",
    "int8",
    "int8:activations=none",
    "int4",
    "int4:group_size=32",
    "int4:group_size=32,symmetric=false",
)
_WINDOW = 512


@click.argument("model", default="demo")
@click.option(
    "--method",
    "methods",
    multiple=True,
    default=_METHODS,
    metavar="METHOD[:KEY=VALUE,...]",
    show_default=True,
    help="Quantization method to measure, with its options; repeatable.",
)
@click.option(
    "--kv-cache-dtype",
    "cache_dtypes",
    multiple=True,
    metavar="DTYPE",
    help="Data type of a KV cache to measure too; repeatable.",
)
@click.option(
    "--checkpoint",
    "checkpoints",
    multiple=True,
    metavar="MODEL",
    help="Checkpoint of the same model that is quantized already, to measure too; repeatable. Its tokens are MODEL's.",
)
@click.option(
    "--text",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File of UTF-8 text to predict. Default: the demo model's held-out text.",
)
@click.option(
    "--tokens",
    default=16_384,
    show_default=True,
    type=click.IntRange(min=_WINDOW),
    help="Tokens of the text to predict.",
)
@click.option(
    "--dtype", default="bfloat16", show_default=True, help="Data type of activations, and of the unquantized model."
)
@click.option(
    "--platform", default=None, help="Kind of device to run on. Default: an accelerator if one is found, else cpu."
)
@benchmark("quality", "Loss on held-out text, by quantization method.")
def quality(
    model: str,
    methods: tuple[str, ...],
    cache_dtypes: tuple[str, ...],
    text: Path | None,
    tokens: int,
    dtype: str,
    platform: str | None,
    checkpoints: tuple[str, ...] = (),
) -> BenchResult:
    """Measure the mean loss of MODEL, in nats per token, when it is quantized while loading by each METHOD, and of
    each checkpoint of the same model that is quantized already.

    The text is cut into windows of 512 tokens; a token is predicted from those before it in its window. The peer is the
    loss of the same model on the same tokens, unquantized.
    """
    words = _read(text or demo_model() / "heldout.txt")
    common = {"dtype": dtype, **({"platform": platform} if platform else {})}
    changes: dict[str, dict[str, str]] = {dtype: {}}
    for method in methods:
        name, _, options = method.partition(":")
        changes[method] = {"quantization": name, "quantization_options": options}
    changes |= {f"cache {cache}": {"kv_cache_dtype": cache} for cache in cache_dtypes}
    configs = {name: EngineConfig.create(model=model, **common, **change) for name, change in changes.items()}
    tokenizer = str(resolve_model(model)) if checkpoints else ""
    for checkpoint in checkpoints:
        configs[Path(checkpoint).name] = EngineConfig.create(model=checkpoint, tokenizer=tokenizer, **common)
    for config in configs.values():
        draw(config)  # refuses what is asked wrongly, before the first is measured
    losses = {name: _loss(config, words, tokens) for name, config in configs.items()}
    plain, count = losses.pop(dtype)
    rows = [BenchRow(dtype, plain, "nats/token", note=f"{count:,} tokens scored")]
    rows += [_row(name, loss, plain) for name, (loss, _) in losses.items()]
    return BenchResult("quality", tuple(rows), peer=f"the same model in {dtype}, unquantized")


def _row(name: str, loss: float, plain: float) -> BenchRow:
    return BenchRow(name, loss, "nats/token", peer=plain, note=f"{loss / plain - 1:+.2%}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: cannot be read as UTF-8 text: {error}") from None


def _loss(config: EngineConfig, text: str, tokens: int) -> tuple[float, int]:
    """The mean negative log-probability of the text's tokens but for the first of each window, and of how many.

    Raises ConfigError for a text that has no such token.
    """
    with LLM.from_config(config) as llm:
        ids = llm.tokenizer.encode(text)[:tokens]
        if len(ids) < 2:
            raise ConfigError(f"--text has {len(ids)} tokens, none of which follows another; give a longer text")
        windows = [ids[start : start + _WINDOW] for start in range(0, len(ids) - 1, _WINDOW)]
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        total, count = 0.0, 0
        for output in llm.generate(windows, params, use_tqdm=False):
            scored = [entry for entry in output.prompt_logprobs or () if entry]
            total -= sum(entry[token].logprob for entry, token in zip(scored, output.prompt_token_ids[1:], strict=True))
            count += len(scored)
    return total / count, count
