"""A tokenizer that knows every token, to try a parser where its model's tokenizer is not at hand."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


class _AnyVocabulary(dict[str, int]):
    """Whatever token a parser asks for is there, and from then on is one token."""

    def __init__(self) -> None:
        super().__init__()
        self.special: set[str] = set()

    def number(self, token: str) -> int:
        """The number of a token."""
        return self.setdefault(token, len(self))

    def get(self, token: str, default: object = None) -> int:
        del default
        return self[token]

    def __getitem__(self, token: str) -> int:
        self.special.add(token)
        return self.number(token)

    def __contains__(self, token: object) -> bool:
        return isinstance(token, str)


class StandInTokenizer:
    """Splits at the tokens that were asked for, and else at spaces."""

    def __init__(self) -> None:
        self._vocabulary = _AnyVocabulary()

    def get_vocab(self) -> dict[str, int]:
        """Every token, as it turns out."""
        return self._vocabulary

    vocab = property(get_vocab)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: object) -> list[int]:
        """The tokens of `text`."""
        del add_special_tokens
        special = sorted(filter(None, self._vocabulary.special), key=len, reverse=True)
        pattern = "|".join([*map(re.escape, special), r"\s+", r"\w+", r"\W"])
        return [self._vocabulary.number(token) for token in re.findall(pattern, text)]

    def decode(self, ids: Iterable[int] | int, **_: object) -> str:
        """The text of these tokens."""
        return "".join(self.convert_ids_to_tokens([ids] if isinstance(ids, int) else list(ids)))

    def convert_ids_to_tokens(self, ids: Sequence[int], **_: object) -> list[str]:
        """The tokens with these numbers."""
        tokens = list(self._vocabulary)
        return [tokens[number] for number in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int]:
        """The numbers of these tokens."""
        if isinstance(tokens, str):
            return self._vocabulary[tokens]
        return [self._vocabulary[token] for token in tokens]

    def tokenize(self, text: str, **_: object) -> list[str]:
        """The tokens of `text`, as text."""
        return self.convert_ids_to_tokens(self.encode(text))
