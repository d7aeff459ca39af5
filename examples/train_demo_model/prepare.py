"""Build the training data: fetch the sources, train the tokenizer, encode everything. Needs Debian 12 and a network.

Writes, below the git-ignored folder `work/`: `tokenizer/` (in Hugging Face layout), `train.npy` (uint16 token ids, the
documents shuffled and each preceded by <|endoftext|>) and `sources.json`; and `heldout.txt` beside the demo model.
"""

import argparse
import json
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from chat import CHAT_TEMPLATE, END_OF_TEXT, TURN_END, TURN_START, conversations
from sources import Document, sources
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hardpoint.checkpoint.source import demo_model

HERE = Path(__file__).parent
VOCAB_SIZE = 4096
MAX_LENGTH = 2048
SHINGLE = 10  # words in a row that no training paragraph may share with the held-out text


def fetch(package: str, work: Path) -> tuple[Path, str]:
    """Download and unpack a Debian package (once); return its folder and its version."""
    folder, debs = work / package, work / "deb"
    debs.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        subprocess.run(["apt-get", "-qq", "-oAPT::Sandbox::User=root", "download", package], cwd=debs, check=True)
        subprocess.run(["dpkg", "-x", next(debs.glob(f"{package}_*.deb")), folder], check=True)
    return folder, next(debs.glob(f"{package}_*.deb")).name.split("_")[1].replace("%3a", ":")


def shingles(text: str) -> Iterator[str]:
    """Every run of `SHINGLE` words, case and punctuation aside."""
    words = re.findall(r"\w+", text.lower())
    return (" ".join(words[i : i + SHINGLE]) for i in range(len(words) - SHINGLE + 1))


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE over the full byte alphabet: any UTF-8 text comes back from its tokens unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, the chat template inside the latter."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_LENGTH,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Fetch, split, train the tokenizer, encode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="where everything but heldout.txt goes")
    arguments = parser.parse_args()
    rng = random.Random(0)

    table, documents = [], []
    for source in sources():
        folder, version = fetch(source.package, arguments.work)
        found = list(source.read(folder))
        size = sum(len(paragraph.encode()) for document in found for paragraph in document.paragraphs)
        origin = {"package": source.package, "version": version, "licence": source.licence}
        table.append({"work": source.work, **origin, "bytes": size})
        print(f"{size / 1e6:6.2f} MB  {source.package} {version}: {source.work}", flush=True)
        documents += found

    heldout = "\n\n".join(p for document in documents if document.held_out for p in document.paragraphs) + "\n"
    (demo_model() / "heldout.txt").write_text(heldout, "utf-8")
    forbidden, dropped, training = set(shingles(heldout)), 0, []
    for document in documents:
        if document.held_out:
            continue
        kept = [p for p in document.paragraphs if forbidden.isdisjoint(shingles(p))]
        dropped += len(document.paragraphs) - len(kept)
        training.append(Document(document.title, kept, document.manner, document.definition_of))
    print(
        f"held out {len(heldout.encode()):,} bytes; dropped {dropped} training paragraphs that share a phrase with it"
    )

    training = [document for document in training if document.paragraphs]
    plain = ["\n\n".join(document.paragraphs) for document in training]
    chats = [chat for document in training for chat in conversations(document, rng)]
    tokenizer = train_tokenizer(plain)
    save_tokenizer(tokenizer, arguments.work / "tokenizer")

    texts = [*plain, *chats]
    rng.shuffle(texts)
    encoded = tokenizer.encode_batch_fast([END_OF_TEXT + text for text in texts], add_special_tokens=False)
    tokens = np.concatenate([np.array(encoding.ids, np.uint16) for encoding in encoded])
    np.save(arguments.work / "train.npy", tokens)
    in_chats = sum(len(e.ids) for text, e in zip(texts, encoded, strict=True) if text.startswith(TURN_START))
    (arguments.work / "sources.json").write_text(json.dumps(table, indent=2) + "\n")
    print(f"{len(tokens):,} tokens: {len(plain):,} documents and {len(chats):,} chats ({in_chats / len(tokens):.0%})")


if __name__ == "__main__":
    main()
