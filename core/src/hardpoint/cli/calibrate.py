"""``hardpoint calibrate``: a checkpoint with scales for a KV cache of 8 or 4 bits."""

from __future__ import annotations

from pathlib import Path

import click

from hardpoint.config import EngineConfig
from hardpoint.terminal.engine_options import EngineCommand
from hardpoint_plugin_api import NVFP4, ConfigError

_FP8 = "float8_e4m3fn"
_ELEMENTS = {"auto": _FP8, "fp8": _FP8, _FP8: _FP8, "int8": "int8", NVFP4: NVFP4}


@click.command(cls=EngineCommand, title="Data and output", short_help="Write scales for a KV cache of 8 or 4 bits.")
@click.option(
    "--data", required=True, type=click.Path(path_type=Path, dir_okay=False), help="File of UTF-8 text to run."
)
@click.option("--output", required=True, type=click.Path(path_type=Path), help="New folder for the checkpoint.")
@click.option(
    "--windows", default=64, show_default=True, type=click.IntRange(min=1), help="Most prompts of 512 tokens to run."
)
def calibrate(config: EngineConfig, data: Path, output: Path, windows: int) -> None:
    """Run MODEL on a text, and write it to a new folder with scales that the largest keys and values fit.

    With --kv-cache-dtype int8 or nvfp4 they are for such a cache, else for one of fp8. Weights are linked, not copied.
    """
    from hardpoint.checkpoint.checkpoint import Checkpoint
    from hardpoint.cli.cache_calibration import check, measure, write
    from hardpoint.engine.locations import model_location

    element = _ELEMENTS.get(config.kv_cache_dtype)
    if element is None:
        raise ConfigError(f"--kv-cache-dtype {config.kv_cache_dtype}: scales can be calibrated for fp8, int8 and nvfp4")
    try:
        text = data.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--data {data}: cannot be read as UTF-8 text: {error}") from None
    checkpoint = Checkpoint.read(model_location(config))
    check(checkpoint, output, element)
    found, tokens = measure(config, text, windows)
    write(checkpoint, output, found, element)
    click.echo(f"{output}: scales of {len(found)} layers for a cache of {element}, from {tokens:,} tokens")
