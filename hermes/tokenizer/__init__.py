"""Tokenizers, chat templates and the prompt contract; needs no torch."""

from hermes.tokenizer.contract import prompt_contract, suppressed_tokens
from hermes.tokenizer.gguf import tokenizer_from_gguf
from hermes.tokenizer.interface import PromptContract, Tokenizer
from hermes.tokenizer.opening import open_tokenizer, tokenizer_files

__all__ = [
    "PromptContract",
    "Tokenizer",
    "open_tokenizer",
    "prompt_contract",
    "suppressed_tokens",
    "tokenizer_files",
    "tokenizer_from_gguf",
]
