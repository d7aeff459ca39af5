"""Which parsers read a model's output: what the user says, else what the model's chat template shows."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from hardpoint.config import EngineConfig
from hardpoint.parsers.chain import OutputParser
from hardpoint.plugin_host import LockFile, PluginSet, discover
from hardpoint.selection import Selector, Settings
from hardpoint_plugin_api import (
    DeviceInfo,
    ParserArgs,
    PluginError,
    ReasoningParser,
    ReasoningParserWorkload,
    SelectionError,
    ToolParser,
    ToolParserWorkload,
    Workload,
)

logger = logging.getLogger(__name__)

_NOWHERE = DeviceInfo("none", "no device", "cpu", "none", accelerator=False)
"""Parsers run where text is, whatever device the model runs on."""


_VLLM_NAMES = {
    "tool_parser": {
        "deepseek_v3": "deepseek",
        "deepseek_v31": "deepseek",
        "deepseek_v32": "dsml",
        "glm45": "glm",
        "glm47": "glm",
        "kimi_k2": "kimi",
        "llama4_json": "llama3_json",
        "llama4_pythonic": "pythonic",
        "openai": "harmony",
    },
    "reasoning_parser": {
        "deepseek_v3": "think",
        "glm45": "think",
        "glm47": "think",
        "kimi_k2": "think",
        "openai_gptoss": "harmony",
        "qwen3": "think",
    },
}
"""Names that vLLM gives to parsers of the same outputs."""


@dataclass(frozen=True)
class Parsers:
    """The parsers of one model; None where an output is content as it stands."""

    tool: type[ToolParser] | None = None
    reasoning: type[ReasoningParser] | None = None

    @property
    def needs_special_tokens(self) -> bool:
        """True where special tokens must be left in the text that is fed."""
        return any(parser is not None and parser.needs_special_tokens for parser in (self.tool, self.reasoning))

    def open(self, args: ParserArgs) -> OutputParser:
        """A parser for one output."""
        return OutputParser(self.reasoning(args) if self.reasoning else None, self.tool(args) if self.tool else None)


def choose_parsers(
    config: EngineConfig,
    *,
    architecture: str | None = None,
    chat_template: str = "",
    special_tokens: Iterable[str] = (),
    plugins: PluginSet | None = None,
) -> Parsers:
    """The parsers that ``config`` asks for; without a word of the user's, those that recognize ``chat_template``.

    ``chat_template`` is the text of all the model's templates. Imports the targets of parsers alone. Raises
    UnknownNameError for a name that no parser has, SelectionError where it cannot serve, PluginError.
    """
    if plugins is None:
        lock = LockFile.read(Path(config.plugins_lock_file)) if config.plugins_locked else None
        plugins = discover(config.plugins, lock)
    choices = {family: _known_name(family, name, plugins) for family, name in config.choices.items()}
    settings = Settings(choices, by_use=frozenset(config.use))
    selector = Selector(plugins, _NOWHERE, settings, load=plugins.load, asked=config.plugins or ())
    tokens = frozenset(special_tokens)
    found: dict[str, type | None] = {}
    for workload_class, base in ((ToolParserWorkload, ToolParser), (ReasoningParserWorkload, ReasoningParser)):
        choice = choices.get(workload_class.family)
        template = chat_template if choice is None else None
        workload = workload_class(architecture=architecture, chat_template=template, special_tokens=tokens)
        if choice == "none":
            found[workload.family] = None
        else:
            found[workload.family] = _chosen(selector, plugins, workload, base, choice is not None)
    return Parsers(
        cast(type[ToolParser] | None, found["tool_parser"]),
        cast(type[ReasoningParser] | None, found["reasoning_parser"]),
    )


def _known_name(family: str, name: str, plugins: PluginSet) -> str:
    """``name``, or the parser here that reads what vLLM's parser of that name does."""
    return name if name in plugins.names(family) else _VLLM_NAMES.get(family, {}).get(name, name)


def _chosen(selector: Selector, plugins: PluginSet, workload: Workload, base: type, by_name: bool) -> type | None:
    try:
        plan = selector.select(workload)
    except SelectionError:
        if by_name:
            raise
        return None  # nothing recognizes the template
    target = plugins.load(plan.offer)
    if not (isinstance(target, type) and issubclass(target, base)):
        raise PluginError(f"{plan.offer.contribution.target} of plugin {plan.offer.plugin} is no {base.__name__}")
    logger.info("%s: %s (%s)", workload.family, plan.offer.contribution.name, plan.offer.plugin)
    return target
