"""Byte-level BPE from its definition, in plain Python: the oracle for rebuilt tokenizers."""

from __future__ import annotations

import itertools

import regex

GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def byte_spelling() -> dict[int, str]:
    """GPT-2's printable character for every byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in printable}
    for byte in range(256):
        if byte not in spelling:
            spelling[byte] = chr(256 + len(spelling) - len(printable))
    return spelling


class ReferenceBpe:
    """Ids of a text: split off special tokens, then words, then merge by rank."""

    def __init__(
        self,
        tokens: list[str],
        merges: list[str],
        special: list[str],
        *,
        words: str = GPT2_WORDS,
        digits_alone: bool = False,
        whole_words: bool = False,
    ) -> None:
        self.ids = {text: index for index, text in enumerate(tokens)}
        self.ranks = {tuple(merge.split(" ", 1)): rank for rank, merge in enumerate(merges)}
        ordered = sorted(special, key=len, reverse=True)
        self.special = set(special)
        self.splitter = regex.compile("(" + "|".join(map(regex.escape, ordered)) + ")")
        self.words = regex.compile(words)
        self.digits_alone = digits_alone
        self.whole_words = whole_words
        self.spelling = byte_spelling()

    def encode(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in self.splitter.split(text) if self.special else [text]:
            if part in self.special:
                ids.append(self.ids[part])
            else:
                for word in self._split(part):
                    ids.extend(self._merge("".join(self.spelling[b] for b in word.encode())))
        return ids

    def _split(self, text: str) -> list[str]:
        parts = regex.split(r"(\p{N})", text) if self.digits_alone else [text]
        return [word for part in parts for word in self.words.findall(part)]

    def _merge(self, word: str) -> list[int]:
        if self.whole_words and word in self.ids:
            return [self.ids[word]]
        pieces = list(word)
        while len(pieces) > 1:
            pairs = enumerate(itertools.pairwise(pieces))
            ranked = [(self.ranks[pair], at) for at, pair in pairs if pair in self.ranks]
            if not ranked:
                break
            at = min(ranked)[1]
            pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
        return [self.ids[piece] for piece in pieces]
