"""The output of ``hardpoint explain`` for devices that are not here, as text files that a reviewer reads.

``python -m tests.platforms.explained`` writes ``explained/DEVICE.txt`` again. A difference in review is another kernel
on that device.

Each line: the layer or op, its specs, the step sizes, the kernel chosen (and its plugin). Below it, the plugin's
kernels that were rejected, with their reasons' codes, other than kernels for other number formats. The first model
lists everything; the others list what those before them do not have.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint.config import EngineConfig
from hardpoint.engine.explain import explain
from hardpoint.plugin_host import discover
from hardpoint.selection.table import Row
from hardpoint.structured.bytes import byte_tokenizer
from hardpoint_plugin_api import DeviceInfo

FOLDER = Path(__file__).with_name("explained")
DEVICES = (
    *("zen4", "sapphire-rapids"),
    *("a100", "h100", "b200"),
    *("mi210", "mi300x", "mi355x", "rx7900xtx", "rx9070xt"),
    *("b580", "max1550"),
)
_QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}
_EXPERTS = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
_LATENT = {
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": None,
}
MODELS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen3-8B": (_QWEN3, {}),
    "Qwen3-8B --quantization fp8 --kv-cache-dtype fp8": (_QWEN3, {"quantization": "fp8", "kv_cache_dtype": "fp8"}),
    "Qwen3-8B --kv-cache-dtype nvfp4": (_QWEN3, {"kv_cache_dtype": "nvfp4"}),
    "Qwen3-8B --quantization int8 --kv-cache-dtype int8": (_QWEN3, {"quantization": "int8", "kv_cache_dtype": "int8"}),
    "Qwen3-8B --quantization int4": (_QWEN3, {"quantization": "int4"}),
    "Qwen3-30B-A3B --quantization fp8": (_QWEN3 | _EXPERTS, {"quantization": "fp8"}),
    "DeepSeek-V2-Lite without experts": (_QWEN3 | _LATENT, {}),
}
"""The models' shapes, of one layer: config.json and settings."""
_OTHER_FORMAT = {"spec", "kv-dtype", "layout"}
_FAMILIES = ("attention", "linear", "experts", "op")


def explained(device: DeviceInfo) -> str:
    """The text for ``device``, a preset: core and the device's own plugin, whatever else is installed here."""
    fp8 = f"8-bit floats in {device.fp8.dtype} up to {device.fp8.max:g}" if device.fp8 else "no 8-bit floats"
    parts, seen = [f"{device.name}: {device.platform}, {device.arch}, {fp8}\n"], set[str]()
    for title, (shape, settings) in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "config.json").write_text(json.dumps(shape))
            byte_tokenizer().save(str(Path(folder, "tokenizer.json")))
            config = EngineConfig.create(model=folder, load_format="random", plugins=(device.platform,), **settings)
            table = explain(config, device.name)
        lines = dict.fromkeys(_line(row) for row in table.rows if row.family in _FAMILIES)
        parts += [f"\n{title}\n", *(f"  {line}\n" for line in lines if line not in seen)]
        seen |= set(lines)
    return "".join(parts)


def _line(row: Row) -> str:
    fields = dict(field.split("=", 1) for field in row.workload.split() if "=" in field)
    size = f"{fields['in_features']}x{fields['out_features']}" if "in_features" in fields else None
    what = " ".join(filter(None, (row.family, row.of, size, fields.get("spec"), fields.get("kv_dtype"))))
    against = [
        f"\n      not {rejected.offer.contribution.name}: {', '.join(codes)}"
        for rejected in row.rejected
        if rejected.offer.plugin != "core"
        and not _OTHER_FORMAT.intersection(codes := list(dict.fromkeys(reason.code for reason in rejected.reasons)))
    ]
    return f"{what} | {row.range} | {row.chosen} ({row.plugin}){''.join(against)}"


def main() -> None:
    """Write all files."""
    presets = discover().devices()
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or DEVICES:
        (FOLDER / f"{name}.txt").write_text(explained(presets[name]))


if __name__ == "__main__":
    main()
