"""Writes the tables of docs/coming_from_vllm.md from core's tables of vLLM's names and fields."""

from __future__ import annotations

from pathlib import Path

from hardpoint.config.errors import flag_of
from hardpoint.config.vllm_names import vllm_names
from hardpoint.engine.vllm_params import RENAMED, VLLM_PARAMS
from hardpoint.server.vllm_fields import ANSWERS

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from_vllm.md"
MARK = "<!-- written by scripts/write_vllm_names.py -->\n"
PARAMS = """
## Parameters of sampling

Keywords of `SamplingParams`. vLLM's defaults are accepted silently; one without effect is logged once.

"""
FIELDS = """
## Fields of requests

Fields of vLLM's requests work where [serving.md](serving.md#fields) names them. Others are ignored, listed in the
response's header `x-hardpoint-ignored-fields`, and answered once in the log:

"""


def table() -> str:
    """The table, as Markdown."""
    rows = ["| vLLM | here |", "|---|---|"]
    flags: dict[str, list[str]] = {}
    for flag, name in vllm_names().items():
        if name.setting is None or flag != flag_of(name.setting):  # else only its short form is vLLM's own
            flags.setdefault(name.flag, []).append(flag)
    rows += [f"| `{'`, `'.join(flags[flag])}` | {vllm_names()[flag].answer} |" for flag in flags]
    return "\n".join(rows) + "\n"


def field_table() -> str:
    """The table of fields, as Markdown."""
    rows = ["| field of vLLM | here |", "|---|---|"]
    return "\n".join([*rows, *(f"| `{name}` | {answer} |" for name, answer in ANSWERS.items())]) + "\n"


def param_table() -> str:
    """The table of sampling parameters, as Markdown."""
    rows = ["| parameter of vLLM | here |", "|---|---|"]
    rows += [f"| `{theirs}` | the same as `{ours}` |" for theirs, ours in RENAMED.items()]
    for name, param in VLLM_PARAMS.items():
        rows.append(f"| `{name}` | {'no effect' if param.is_harmless else 'refused'}: {param.answer} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(
        text[: text.index(MARK) + len(MARK)] + "\n" + table() + PARAMS + param_table() + FIELDS + field_table(),
        encoding="utf-8",
    )
