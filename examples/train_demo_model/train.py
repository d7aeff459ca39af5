"""Train the demo model on `work/train.npy` (see prepare.py) and write it in Hugging Face layout.

Axes: B sequences of a step, T tokens of a sequence, V vocabulary.
"""

import argparse
import copy
import json
import math
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from evaluate import heldout_ids, text_loss
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
WARMUP_STEPS = 200
CALIBRATION = (40, 80)  # the steps between which --minutes times a step
ALIGNED_SHARE = 0.25  # of the sequences begin where a document does, so that a prompt's first tokens are no surprise
END_OF_TEXT, TURN_END = 0, 2


def demo_config(vocab_size: int = 4096, max_length: int = 2048) -> Qwen3Config:
    """3.8 million parameters, 7.6 MB in bfloat16; every matrix side is a multiple of 128."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_length,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=END_OF_TEXT,
        eos_token_id=TURN_END,
        pad_token_id=END_OF_TEXT,
    )


class Sampler:
    """Draws sequences from the token stream, uniformly at random but for `ALIGNED_SHARE` of them."""

    def __init__(self, tokens: torch.Tensor, length: int, seed: int) -> None:
        self.tokens, self.window = tokens, torch.arange(length + 1, device=tokens.device)
        self.last = len(tokens) - length - 1
        starts = (tokens == END_OF_TEXT).nonzero().flatten()
        self.starts = torch.cat([starts, starts + 1])  # with <|endoftext|> before the document, and without
        self.starts = self.starts[self.starts <= self.last]
        self.rng = torch.Generator(tokens.device).manual_seed(seed)

    def batch(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both (B, T) int64."""
        aligned = int(size * ALIGNED_SHARE)
        device = self.tokens.device
        anywhere = torch.randint(self.last, (size - aligned,), generator=self.rng, device=device)
        at_start = self.starts[torch.randint(len(self.starts), (aligned,), generator=self.rng, device=device)]
        rows = self.tokens[torch.cat([anywhere, at_start])[:, None] + self.window].long()
        return rows[:, :-1], rows[:, 1:]


def learning_rate(step: int, num_steps: int, peak: float) -> float:
    """Linear warm-up over `WARMUP_STEPS`, then a cosine from `peak` to one hundredth of it."""
    if step < WARMUP_STEPS:
        return peak * (step + 1) / WARMUP_STEPS
    progress = (step - WARMUP_STEPS) / max(num_steps - WARMUP_STEPS, 1)
    return peak * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


def optimizer_for(model: torch.nn.Module, peak: float, device: str) -> torch.optim.AdamW:
    """AdamW; matrices decay, the gains of the norms do not."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    gains = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=device == "cuda")


def save(model: Qwen3ForCausalLM, tokenizer_folder: Path, out: Path) -> None:
    """Write the weights in bfloat16 with the configuration and the tokenizer."""
    rounded = copy.deepcopy(model).to(torch.bfloat16)
    rounded.generation_config = GenerationConfig(
        bos_token_id=END_OF_TEXT, eos_token_id=[TURN_END, END_OF_TEXT], pad_token_id=END_OF_TEXT
    )
    rounded.save_pretrained(out)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, out)


def main() -> None:
    """Train, log one JSON line per report, save now and then and at the end."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder that prepare.py filled")
    parser.add_argument("--out", type=Path, default=HERE / "work" / "checkpoint", help="folder for the checkpoint and log")
    parser.add_argument("--minutes", type=float, help="choose the number of steps so that training takes this long")
    parser.add_argument("--steps", type=int, default=4000, help="number of steps, unless --minutes is given")
    parser.add_argument("--batch", type=int, default=128, help="sequences per step")
    parser.add_argument("--length", type=int, default=2048, help="tokens per sequence")
    parser.add_argument("--peak", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="a few small steps, to see that everything runs")
    options = parser.parse_args()
    if options.smoke:
        options.minutes, options.steps, options.batch, options.length = None, 6, 4, 256

    began = time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    options.out.mkdir(parents=True, exist_ok=True)
    tokenizer_folder = options.work / "tokenizer"
    tokens = torch.from_numpy(np.load(options.work / "train.npy").astype(np.int32)).to(device)
    sampler = Sampler(tokens, options.length, options.seed)
    heldout, heldout_bytes = heldout_ids(tokenizer_folder)
    heldout = heldout.to(device)[: 4097 if options.smoke else None]
    heldout_bytes = heldout_bytes if not options.smoke else heldout_bytes * 4096 // (len(heldout_ids(tokenizer_folder)[0]) - 1)

    model = Qwen3ForCausalLM(demo_config()).to(device)
    model.train()
    optimizer = optimizer_for(model, options.peak, device)

    def loss_of(x_BT: torch.Tensor, y_BT: torch.Tensor) -> torch.Tensor:
        logits_BTV = model(input_ids=x_BT, use_cache=False).logits
        return F.cross_entropy(logits_BTV.flatten(0, 1).float(), y_BT.flatten())

    def backward(step_loss: "torch.nn.Module | object") -> torch.Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss: torch.Tensor = step_loss(*sampler.batch(options.batch))  # type: ignore[operator]
        loss.backward()
        return loss.detach()

    log = (options.out / "log.jsonl").open("w")

    def report(**entry: object) -> None:
        line = json.dumps({**entry, "seconds": round(time.monotonic() - began, 1)})
        print(line, flush=True)
        print(line, file=log, flush=True)

    report(device=torch.cuda.get_device_name() if device == "cuda" else "cpu", torch=torch.__version__,
           transformers=transformers.__version__, parameters=sum(p.numel() for p in model.parameters()),
           corpus_tokens=len(tokens), command=sys.argv)  # fmt: skip

    step_loss: object = loss_of
    if device == "cuda":
        step_loss = torch.compile(loss_of)
        try:
            backward(step_loss)
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises, eager mode is slower but right
            report(compile="failed, running eagerly", error=f"{type(error).__name__}: {error}"[:500])
            step_loss = loss_of
        optimizer.zero_grad()

    num_steps, mark = options.steps, 0.0
    step = 0
    while step < num_steps:
        rate = learning_rate(step, num_steps, options.peak)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = backward(step_loss)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if options.minutes and step in CALIBRATION:
            loss.item()  # waits for the device
            if step == CALIBRATION[1]:
                each = (time.monotonic() - mark) / (CALIBRATION[1] - CALIBRATION[0])
                num_steps = step + int((options.minutes * 60 - (time.monotonic() - began)) / each)
                report(seconds_per_step=round(each, 4), num_steps=num_steps)
            mark = time.monotonic()
        if step % 100 == 0 or step == num_steps or options.smoke:
            report(step=step, loss=round(loss.item(), 4), norm=round(float(norm), 3), rate=round(rate, 6))
        if step % 500 == 0 or step == num_steps:
            model.eval()
            report(step=step, heldout=str(text_loss(model, heldout, heldout_bytes)))
            model.train()
            save(model, tokenizer_folder, options.out)
    report(num_steps=num_steps, tokens_seen=num_steps * options.batch * options.length)


if __name__ == "__main__":
    main()
