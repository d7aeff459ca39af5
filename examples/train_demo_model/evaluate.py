"""Print a checkpoint's loss on heldout.txt, text that it never trained on. Needs no accelerator.

Example: python evaluate.py ../../core/src/hardpoint/demo_model
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, pad
from transformers import PreTrainedModel, Qwen3ForCausalLM

from hardpoint.checkpoint.source import demo_model

HELDOUT = demo_model() / "heldout.txt"


@dataclass(frozen=True)
class Loss:
    """Cross-entropy over a whole text: per token in nats, per UTF-8 byte in bits."""

    nats_per_token: float
    bits_per_byte: float
    num_tokens: int

    def __str__(self) -> str:
        rates = f"{self.nats_per_token:.4f} nats/token, {self.bits_per_byte:.4f} bits/byte"
        return f"{rates} over {self.num_tokens:,} tokens"


@torch.inference_mode()
def text_loss(
    model: PreTrainedModel, ids: torch.Tensor, num_bytes: int, window: int = 1024, stride: int = 512, batch: int = 8
) -> Loss:
    """The loss of the tokens `ids` (1-D, the first is context only), each predicted once from
    `window - stride` or more before it (the first ones from what there is).

    The windows overlap: in each but the first, the leading `window - stride` predictions are not counted.
    """
    starts = range(0, max(len(ids) - 1 - (window - stride), 1), stride)
    missing = starts[-1] + window + 1 - len(ids)
    targets = pad(ids, (0, missing), value=-100).unfold(0, window + 1, stride)[:, 1:].clone()
    inputs = pad(ids, (0, missing), value=0).unfold(0, window + 1, stride)[:, :-1]
    targets[1:, : window - stride] = -100
    total = 0.0
    for at in range(0, len(inputs), batch):
        logits = model(input_ids=inputs[at : at + batch], use_cache=False).logits.flatten(0, 1).float()
        total += cross_entropy(logits, targets[at : at + batch].flatten(), reduction="sum").item()
    return Loss(total / (len(ids) - 1), total / math.log(2) / num_bytes, len(ids) - 1)


def heldout_ids(tokenizer_folder: Path, path: Path = HELDOUT) -> tuple[torch.Tensor, int]:
    """The text's tokens behind one <|endoftext|> (1-D, int64), and its size in bytes."""
    tokenizer, text = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")), path.read_text("utf-8")
    return torch.tensor(tokenizer.encode(f"<|endoftext|>{text}").ids), len(text.encode())


def main() -> None:
    """Load the checkpoint in float32 and print its loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder in Hugging Face layout")
    parser.add_argument("--text", type=Path, default=HELDOUT, help="UTF-8 text to score")
    arguments = parser.parse_args()
    model = Qwen3ForCausalLM.from_pretrained(arguments.checkpoint, dtype=torch.float32)
    print(text_loss(model, *heldout_ids(arguments.checkpoint, arguments.text)))


if __name__ == "__main__":
    main()
