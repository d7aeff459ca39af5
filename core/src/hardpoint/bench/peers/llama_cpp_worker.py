"""llama.cpp through the low-level interface of llama-cpp-python, on a GGUF file, or on one made of the checkpoint.

Options for a checkpoint: ``type`` = BF16 (default), Q8_0, Q4_0 or Q4_K_M. The file is written beside the checkpoint's
folder, once, with the tensor names and keys of llama.cpp's own conversion (its ``gguf-py/gguf/constants.py``); Qwen3
alone. ``repack=false`` for any model: weights stay as they lie in the file (llama.cpp's ``use_extra_bufts``).
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protocol import Worker, serve  # beside this file: workers run by path

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_CONTEXT = 64 * 192


class LlamaCppWorker(Worker):
    """One context with a sequence for each prompt."""

    def load(self, model: str, threads: int, options: dict[str, Any]) -> None:
        import llama_cpp.llama_cpp as lib

        file = _gguf(Path(model), str(options.get("type", "BF16")), threads)
        self._lib = lib
        self._silence = lib.llama_log_callback(lambda *_: None)
        lib.llama_log_set(self._silence, ctypes.c_void_p(0))
        lib.llama_backend_init()
        model_params = lib.llama_model_default_params()
        model_params.use_extra_bufts = str(options.get("repack", "true")) == "true"
        self._model = lib.llama_model_load_from_file(str(file).encode(), model_params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {file}")
        params = lib.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _CONTEXT, 2048, 512, 64
        params.n_threads = params.n_threads_batch = threads
        params.kv_unified = True
        self._context = lib.llama_init_from_model(self._model, params)
        self._vocab = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        import numpy as np

        self._forget()
        newest = [self._prefill(sequence, prompt) for sequence, prompt in enumerate(prompts)]
        position = len(prompts[0])
        for step in range(max_tokens - 1):
            rows = [(token, position + step, sequence, True) for sequence, token in enumerate(newest)]
            self._decode(rows)
            newest = [int(np.argmax(self._logits(i))) for i in range(len(rows))]

    def logprobs(self, prompt: Sequence[int], top: int) -> dict[int, float]:
        import numpy as np

        self._forget()
        self._prefill(0, prompt)
        logits = self._logits(len(prompt) - 1).astype(np.float64)
        total = math.log(np.exp(logits - logits.max()).sum()) + logits.max()
        return {int(i): float(logits[i] - total) for i in np.argsort(-logits)[:top]}

    def version(self) -> str:
        from importlib.metadata import version

        return f"llama-cpp-python {version('llama-cpp-python')}"

    def _prefill(self, sequence: int, prompt: Sequence[int]) -> int:
        import numpy as np

        last = len(prompt) - 1
        self._decode([(token, i, sequence, i == last) for i, token in enumerate(prompt)])
        return int(np.argmax(self._logits(last)))

    def _forget(self) -> None:
        self._lib.llama_memory_clear(self._lib.llama_get_memory(self._context), True)

    def _decode(self, rows: Sequence[tuple[int, int, int, bool]]) -> None:
        """Rows of (token, position, sequence, whether its logits are wanted)."""
        batch = self._lib.llama_batch_init(len(rows), 0, 1)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        batch.n_tokens = len(rows)
        code = self._lib.llama_decode(self._context, batch)
        self._lib.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")

    def _logits(self, row: int) -> Any:
        import numpy as np

        return np.ctypeslib.as_array(self._lib.llama_get_logits_ith(self._context, row), (self._vocab,))


def _gguf(folder: Path, kind: str, threads: int) -> Path:
    """The checkpoint as a GGUF file of type ``kind``; itself where it is one."""
    if folder.suffix == ".gguf":
        return folder
    file = folder.with_name(f"{folder.name}.{kind}.gguf")
    if file.exists():
        return file
    if kind == "BF16":
        _convert(folder, file)
        return file
    import llama_cpp.llama_cpp as lib

    source = _gguf(folder, "BF16", threads)
    params = lib.llama_model_quantize_default_params()
    params.nthread, params.ftype = threads, getattr(lib, f"LLAMA_FTYPE_MOSTLY_{kind}")
    if lib.llama_model_quantize(str(source).encode(), str(file).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp cannot quantize {source} to {kind}")
    return file


def _convert(folder: Path, file: Path) -> None:
    import gguf
    import numpy as np

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(str(file), "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    rope = config.get("rope_parameters") or config
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    header, data = _safetensors(folder / "model.safetensors")
    for name, about in header.items():
        start, end = about["data_offsets"]
        bits = np.frombuffer(data, np.uint16, (end - start) // 2, start).reshape(about["shape"])
        if bits.ndim == 1:  # norms are float32 in GGUF
            writer.add_tensor(_renamed(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = np.ascontiguousarray(bits).view(np.uint8)
            writer.add_tensor(_renamed(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _renamed(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _safetensors(file: Path) -> tuple[dict[str, Any], memoryview]:
    """Header and data of a safetensors file, bfloat16 alone: numpy has no such dtype."""
    content = memoryview(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8 : 8 + size]))
    header.pop("__metadata__", None)
    if any(about["dtype"] != "BF16" for about in header.values()):
        raise RuntimeError(f"{file}: only bfloat16 checkpoints are converted")
    return header, content[8 + size :]


if __name__ == "__main__":
    serve(LlamaCppWorker())
