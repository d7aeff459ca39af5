"""Text to tokens and back, and chats to text, from a checkpoint's own files and without Transformers."""

from hardpoint.tokenizer.chat import ChatTemplate
from hardpoint.tokenizer.detokenizer import Detokenizer
from hardpoint.tokenizer.tokenizer import NoTokenizer, Tokenizer, read_tokenizer_config

__all__ = ["ChatTemplate", "Detokenizer", "NoTokenizer", "Tokenizer", "read_tokenizer_config"]
