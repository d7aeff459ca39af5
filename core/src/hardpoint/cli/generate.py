"""``hardpoint generate``: text from prompts. Text goes to stdout, everything said about it to stderr."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import click

from hardpoint import startup_times
from hardpoint.cli.log import show_log
from hardpoint.config import EngineConfig
from hardpoint.config.errors import flag_of
from hardpoint.engine.early_device import begin_device
from hardpoint.engine.lora import LoRARequest
from hardpoint.garbage_collection import no_collections
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint.terminal.output import check_writable, make_folder, print_table, write_text
from hardpoint_plugin_api import ConfigChange, ConfigError, RequestError, StructuredOutput

if TYPE_CHECKING:
    from hardpoint.engine.frontend.prompts import Prompt
    from hardpoint.engine.llm import LLM
    from hardpoint.engine.outputs import RequestOutput
    from hardpoint.engine.sampling_params import SamplingParams


@click.command(cls=EngineCommand, title="Prompts and outputs", short_help="Continue prompts with a model.")
@click.option("--prompt", "prompts", multiple=True, metavar="TEXT", help="Text to continue. Repeatable. -: read stdin.")
@click.option("--chat", is_flag=True, help="Send each prompt as a user message, formatted by the chat template.")
@click.option("--system", metavar="TEXT", help="System message for --chat.")
@click.option("--lora", metavar="PATH", help="LoRA adapter to use: a folder, a hub id, or a name in --lora-modules.")
@click.option("--max-tokens", type=int, default=128, show_default=True, help="Most tokens to generate per prompt.")
@click.option("--temperature", type=float, help="Sampling temperature; 0 is greedy.  [default: the model's own, or 0]")
@click.option("--top-k", type=int, help="Sample from the K likeliest tokens only.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens only, up to this total probability.")
@click.option("--min-p", type=float, help="Drop tokens below this share of the likeliest token's probability.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End the output before this text. Repeatable.")
@click.option("--json-schema", metavar="JSON|FILE", help="Constrain the output to JSON that is valid by this schema.")
@click.option("--regex", metavar="PATTERN", help="Constrain the output to text that matches this regular expression.")
@click.option("--choice", multiple=True, metavar="TEXT", help="Constrain the output to one of these texts. Repeatable.")
@click.option(
    "--stream/--no-stream", default=None, help="Print the text while it is generated.  [default: on for one prompt]"
)
@click.option(
    "--json", "json_file", metavar="FILE", help="Write outputs, speed and the chosen kernels as JSON. -: to stdout."
)
@click.option("--profile", "profile", metavar="DIR", help="Profile the generation and write traces into this folder.")
@click.option("--quiet", is_flag=True, help="Print the generated text only.")
@click.option("--stages", "stages_file", type=click.Path(path_type=Path), hidden=True)
def generate(
    config: EngineConfig,
    prompts: tuple[str, ...],
    chat: bool,
    system: str | None,
    lora: str | None,
    max_tokens: int,
    stop: tuple[str, ...],
    json_schema: str | None,
    regex: str | None,
    choice: tuple[str, ...],
    stream: bool | None,
    json_file: str | None,
    profile: str | None,
    quiet: bool,
    stages_file: Path | None,
    **sampling: float | None,
) -> None:
    """Continue prompts with MODEL: a folder, a GGUF file, a hub id, or the built-in demo.

    The text goes to stdout; the chosen kernels and the speed go to stderr.
    """
    if system is not None and not chat:
        raise click.UsageError("--system goes with --chat")
    if config.skip_tokenizer_init:
        raise click.UsageError("--skip-tokenizer-init: prompts here are text; send token ids to 'hardpoint serve'")
    check_writable("--json", json_file)
    check_writable("--stages", None if stages_file is None else str(stages_file))
    make_folder("--profile", profile)
    texts = _read_prompts(prompts)
    if stream and len(texts) > 1:
        raise click.UsageError("--stream goes with one prompt; leave it out for several")
    show_log(logging.WARNING if quiet else logging.INFO)
    settings: dict[str, Any] = {"max_tokens": max_tokens, "stop": stop} | {
        k: v for k, v in sampling.items() if v is not None
    }
    settings["structured"] = _structured(json_schema, regex, choice)
    if "seed" in config.explicit:
        settings["seed"] = config.seed  # of every request alike
    _check_sampling(settings)
    adapter = None if lora is None else LoRARequest(lora, 1, config.lora_paths.get(lora, lora))
    if adapter is not None:
        config, _ = config.with_changes([ConfigChange("enable_lora", True, "--lora names an adapter")])
    llm = _load(config)
    try:
        params = replace(llm.default_sampling_params(), **settings)
        inputs: list[Prompt] = [_chat_prompt(llm, text, system) if chat else text for text in texts]
        to_stdout = json_file != "-"
        if profile is not None:
            llm.start_profile(profile, layers=True)
        pace: dict[str, float] = {}
        if stream if stream is not None else len(inputs) == 1:
            output, pace = _stream(llm, inputs[0], params, adapter, show=to_stdout)
            outputs = [output]
        else:
            outputs = llm.generate(inputs, params, use_tqdm=not quiet, lora_request=adapter)
            _print(texts, outputs, show=to_stdout)
        if profile is not None:
            llm.stop_profile()
        if json_file:
            write_text(json_file, json.dumps(_report(llm, outputs, pace), indent=2, ensure_ascii=False) + "\n")
        if not quiet:
            _print_facts(llm, pace)
    finally:
        llm.close()
    if stages_file:
        startup_times.write(stages_file)


def _load(config: EngineConfig) -> LLM:
    startup_times.mark("command line")
    begin_device(config)
    startup_times.mark("platform")
    with no_collections():
        import torch  # noqa: F401  # first, so that its share of the start is seen

        startup_times.mark("torch")
        import hardpoint.engine.blueprint
        import hardpoint.engine.core  # noqa: F401
        from hardpoint.engine.llm import LLM

    startup_times.mark("engine")
    return LLM.from_config(config)


def _read_prompts(prompts: Sequence[str]) -> list[str]:
    texts = prompts or ("-",)
    if "-" in texts and sys.stdin is None:
        raise click.UsageError("stdin is closed: give --prompt TEXT, or pipe a text in")
    if not prompts and sys.stdin.isatty():
        raise click.UsageError("nothing to continue: give --prompt TEXT, or pipe a text in")
    if prompts.count("-") > 1:
        raise click.UsageError("--prompt - can be given once: there is one stdin")
    try:
        read = [sys.stdin.read() if text == "-" else text for text in texts]
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"stdin cannot be read as text: {error}; give --prompt TEXT") from error
    if not prompts and not read[0]:
        raise click.UsageError("nothing to continue: stdin is empty; give --prompt TEXT, or pipe a text in")
    return read


def _structured(json_schema: str | None, regex: str | None, choice: Sequence[str]) -> StructuredOutput | None:
    """The constraint on outputs. Raises RequestError for an invalid schema."""
    if sum(map(bool, (json_schema, regex, choice))) > 1:
        raise click.UsageError("--json-schema, --regex and --choice exclude each other; give one")
    if json_schema:
        is_text = json_schema.lstrip().startswith(("{", "true", "false"))
        return StructuredOutput.json_schema(json_schema if is_text else _read_schema(json_schema))
    if regex:
        return StructuredOutput.regex(regex)
    return StructuredOutput.choice(choice) if choice else None


def _read_schema(file: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--json-schema {file} is neither a JSON object nor a file to read: {error}") from error


def _check_sampling(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for what is wrong with the flags, by their names, before the model is loaded for nothing."""
    from hardpoint.engine.sampling_params import SamplingParams

    try:
        SamplingParams(**settings)
    except RequestError as error:
        names = re.compile(rf"\b({'|'.join(settings)})\b")
        raise ConfigError(names.sub(lambda name: flag_of(name[0]), str(error)).replace(", or None", "")) from error


def _chat_prompt(llm: LLM, text: str, system: str | None) -> Prompt:
    messages = [{"role": "system", "content": system}] if system is not None else []
    return llm.chat_prompt([*messages, {"role": "user", "content": text}])


def _stream(
    llm: LLM, prompt: Prompt, params: SamplingParams, adapter: LoRARequest | None, *, show: bool
) -> tuple[RequestOutput, dict[str, float]]:
    """Print text as it comes; returns the last output and the pace, see ``_pace``."""
    printed, output, times = 0, None, [time.perf_counter()]
    for output in llm.stream(prompt, params, adapter):
        times.append(time.perf_counter())
        if show:
            click.echo(output.outputs[0].text[printed:], nl=False)
            printed = len(output.outputs[0].text)
    if show:
        click.echo()
    assert output is not None
    return output, _pace(times, len(output.outputs[0].token_ids))


def _pace(times: Sequence[float], num_tokens: int) -> dict[str, float]:
    """Of a stream that began at ``times[0]`` and had an output at each later time: when the first came, and the speed.

    The speed is that of the median step, with the mean number of tokens of a step. So the steps that are recorded or
    captured on their first use do not count.
    """
    steps = [later - earlier for earlier, later in pairwise(times[1:])]
    pace = {"first_token_seconds": times[1] - times[0]} if len(times) > 1 else {}
    if steps and num_tokens > 1:
        pace["steady_tokens_per_second"] = (num_tokens - 1) / len(steps) / max(median(steps), 1e-9)
    return pace


def _print(prompts: Sequence[str], outputs: Sequence[RequestOutput], *, show: bool) -> None:
    for prompt, output in zip(prompts, outputs, strict=True) if show else ():
        if len(outputs) > 1:
            first_line = prompt.strip().partition("\n")[0]
            click.echo(f"--- {first_line[:72]}")
        click.echo(output.outputs[0].text)


def _speeds(llm: LLM) -> dict[str, float]:
    stats = llm.stats
    return {
        "load_seconds": stats.load_seconds,
        "prefill_tokens": stats.prefill_tokens,
        "prefill_tokens_per_second": stats.prefill_tokens / stats.prefill_seconds if stats.prefill_seconds else 0.0,
        "decode_tokens": stats.decode_tokens,
        "decode_tokens_per_second": stats.decode_tokens / stats.decode_seconds if stats.decode_seconds else 0.0,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
    }


def _report(llm: LLM, outputs: Sequence[RequestOutput], pace: Mapping[str, float]) -> dict[str, object]:
    return {
        "model": llm.config.model,
        "outputs": [asdict(output) for output in outputs],
        "speed": {**_speeds(llm), **pace},
        "memory": llm.memory_report().by_tag,
        "selection": llm.table.to_json(),
    }


def _print_facts(llm: LLM, pace: Mapping[str, float]) -> None:
    """Print the implementations that served, each once, and the speed."""
    served: dict[tuple[str, str, str], list[str]] = {}
    for row in llm.table.rows:
        whats = served.setdefault((row.family, row.chosen, row.plugin), [])
        if row.of and row.of not in whats:
            whats.append(row.of)
    print_table(
        ["family", "implementation", "plugin", "of"],
        [[family, chosen, plugin, ", ".join(whats)] for (family, chosen, plugin), whats in served.items()],
        err=True,
    )
    speed = _speeds(llm)
    told = [f"loaded in {speed['load_seconds']:.2f} s"]
    if pace:  # one prompt, as it came
        told.append(f"first token after {pace['first_token_seconds']:.3f} s")
        if "steady_tokens_per_second" in pace:
            told.append(f"then {pace['steady_tokens_per_second']:.0f} tokens/s")
    else:
        told.append(f"prefill {speed['prefill_tokens_per_second']:.1f} tokens/s ({speed['prefill_tokens']:.0f})")
        told.append(f"decode {speed['decode_tokens_per_second']:.1f} tokens/s ({speed['decode_tokens']:.0f})")
    click.echo("; ".join(told), err=True)
    if speed["drafted_tokens"]:
        click.echo(f"drafts: {speed['accepted_tokens']:.0f} of {speed['drafted_tokens']:.0f} right", err=True)
