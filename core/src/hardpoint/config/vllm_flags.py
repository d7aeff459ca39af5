"""Flags of vLLM that have another name here, or no counterpart: what to tell a user who types one.

docs/what_each_engine_calls_this.md has the same rows; a test compares them, and that each flag named here exists.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import MappingProxyType

VLLM_FLAGS = MappingProxyType(
    {
        "--additional-config": "use --PLUGIN.KEY for each key of a plugin",
        "--allowed-origins": "use --cors-origin ORIGIN, once for each origin",
        "--api-server-count": "there is no counterpart: one server process serves an engine",
        "--code-revision": "there is no counterpart: code of a checkpoint is never run",
        "--compilation-config": "use --custom-ops for kernels of ops, --enforce-eager to switch graphs off",
        "--cpu-offload-gb": "there is no counterpart: weights stay on the device; --quantization makes them smaller",
        "--cudagraph-capture-sizes": "there is no counterpart: the platform's plugin chooses the sizes of its graphs",
        "--data-parallel-size": "there is no counterpart: start several servers behind a load balancer",
        "--device": "use --platform NAME (and explain --device PRESET for a device that is not here)",
        "--disable-custom-all-reduce": "use --communicator NAME",
        "--disable-log-requests": "nothing is needed: requests are logged with --access-log only",
        "--distributed-executor-backend": "use --executor mp, or --executor torchrun",
        "--download-dir": "set HF_HOME, the folder of the hub's own cache",
        "--enable-auto-tool-choice": "nothing is needed: tools are parsed by --tool-parser, or by the chat template",
        "--enable-chunked-prefill": "nothing is needed: prompts are always chunked, to --max-num-batched-tokens",
        "--enable-log-requests": "use --access-log",
        "--enable-sleep-mode": "nothing is needed: every engine can sleep",
        "--generation-config": "nothing is needed: the checkpoint's generation_config.json is read",
        "--gpu-memory-utilization": "use --kv-cache-memory SIZE (the cache alone, as in 4GiB), not a share of memory",
        "--guided-decoding-backend": "nothing is needed: structured output has one implementation",
        "--hf-overrides": "there is no counterpart: edit config.json in a copy of the checkpoint",
        "--hf-token": "set HF_TOKEN",
        "--kv-cache-memory-bytes": "use --kv-cache-memory SIZE",
        "--limit-mm-per-prompt": "there is no counterpart: images and audio are not supported",
        "--max-long-partial-prefills": "use --max-num-partial-prefills NUMBER, which counts long prompts alone",
        "--moe-backend": "use --experts-backend NAME",
        "--nnodes": "start each host by torchrun, and use --executor torchrun",
        "--node-rank": "start each host by torchrun, and use --executor torchrun",
        "--num-gpu-blocks-override": "use --kv-cache-memory SIZE",
        "--optimization-level": "use --enforce-eager to switch graphs off; there are no other levels",
        "--override-generation-config": "there is no counterpart: set the parameters in each request",
        "--revision": "use --hub-revision REVISION",
        "--root-path": "there is no counterpart: rewrite the path in the proxy",
        "--scheduling-policy": "nothing is needed: a request may carry a priority",
        "--speculative-config": "use --speculative-method NAME and --num-speculative-tokens NUMBER",
        "--ssl-certfile": "there is no counterpart: put a proxy with TLS in front of the server",
        "--ssl-keyfile": "there is no counterpart: put a proxy with TLS in front of the server",
        "--structured-outputs-config": "nothing is needed: structured output has one implementation",
        "--swap-space": "nothing is needed: a preempted request is computed again",
        "--task": "nothing is needed: models generate text; embeddings are not supported",
        "--tokenizer-revision": "use --hub-revision REVISION for the model and its tokenizer",
        "--tool-call-parser": "use --tool-parser NAME",
        "--trust-remote-code": "there is no counterpart: code of a checkpoint is never run",
        "--uvicorn-log-level": "use --access-log to log requests, --quiet to log warnings alone",
        "-dp": "there is no counterpart: start several servers behind a load balancer",
        "-pp": "use --pipeline-parallel-size NUMBER",
        "-q": "use --quantization METHOD",
        "-tp": "use --tensor-parallel-size NUMBER",
    }
)
"""What to do in place of each flag."""


def advice(flag: str) -> str | None:
    """``"--revision is vLLM's name: use --hub-revision REVISION"``; None for a flag that is not in the table.

    Underscores count as hyphens, as in vLLM, and what follows ``=`` is left out.
    """
    name = flag.partition("=")[0].replace("_", "-")
    instead = VLLM_FLAGS.get(name) or VLLM_FLAGS.get(name.replace("--no-", "--", 1))
    return f"{name} is vLLM's name: {instead}" if instead else None


def advice_on(arguments: Iterable[str]) -> str | None:
    """The advice on the first of a command's arguments that is in the table."""
    return next((found for each in arguments if each.startswith("-") and (found := advice(each))), None)
