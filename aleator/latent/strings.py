"""Strings as rows of whole numbers, for `al.latent.Symbols`: molecules written as SMILES or SELFIES (D9)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from aleator._errors import DataError, message

CHARACTERS = r"."
BRACKETS = r"\[[^\]]*\]"  # SELFIES: [C][=O]; every string of these symbols is a molecule
SMILES = r"\[[^\]]*\]|Br|Cl|."  # atoms of two letters and in brackets are one symbol


@dataclasses.dataclass(frozen=True)
class Strings:
    """A table of symbols: strings ↔ rows (n, length) of numbers, 0 after the end. pattern: what one symbol is, a regular expression.

    >>> table = Strings.of(["CCO", "C=O"])
    >>> table.encode(["OC"])
    array([[3, 2, 0]])
    >>> table.decode([[3, 2, 0]])
    ['OC']
    """

    symbols: tuple[str, ...]
    length: int
    pattern: str = CHARACTERS

    @classmethod
    def of(cls, texts: Sequence[str], pattern: str = CHARACTERS) -> Strings:
        """The table of all symbols in some strings, as long as the longest of them."""
        split = [re.findall(pattern, text) for text in texts]
        if not any(split):
            raise DataError(message("There are no symbols.", f"{len(texts)} strings", "strings that are not empty", "check the strings"))
        return cls(("", *sorted({symbol for row in split for symbol in row})), max(map(len, split)), pattern)

    @property
    def num_symbols(self) -> int:
        """With the end."""
        return len(self.symbols)

    def encode(self, texts: Sequence[str]) -> np.ndarray:
        """Rows of numbers, (n, length)."""
        number = {symbol: i for i, symbol in enumerate(self.symbols)}
        rows = np.zeros((len(texts), self.length), np.int64)
        for row, text in zip(rows, texts, strict=True):
            split = re.findall(self.pattern, text)
            if len(split) > self.length or "".join(split) != text or any(symbol not in number for symbol in split):
                expected = f"at most {self.length} of {self.num_symbols - 1} known symbols"
                raise DataError(message("A string does not fit the table.", repr(text), expected, "make the table of all strings"))
            row[: len(split)] = [number[symbol] for symbol in split]
        return rows

    def decode(self, rows: Any) -> list[str]:
        """Strings up to the first end."""
        texts = []
        for row in np.asarray(rows).astype(int):
            end = np.flatnonzero(row == 0)
            texts.append("".join(self.symbols[i] for i in row[: end[0] if len(end) else None]))
        return texts


def selfies_of(smiles: Sequence[str]) -> list[str]:
    """Molecules as SELFIES (Krenn et al. 2020), in which every string of known symbols is a valid molecule. Those that it cannot write, because
    an atom has more bonds than it allows, become empty strings. Needs the package `selfies`."""
    import selfies

    def one(text: str) -> str:
        try:
            return selfies.encoder(text) or ""
        except selfies.EncoderError:
            return ""

    return [one(text) for text in smiles]


def smiles_of(texts: Sequence[str]) -> list[str]:
    """SELFIES back as SMILES. Needs the package `selfies`."""
    import selfies

    return [selfies.decoder(one) for one in texts]


def valid(smiles: Sequence[str]) -> np.ndarray:
    """Whether each is a molecule to rdkit, and not empty, (n,). Needs the package `rdkit`."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")
    return np.array([bool(one) and Chem.MolFromSmiles(one) is not None for one in smiles])
