"""Documents as rows of different words and their counts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from aleator._errors import DataError, message
from aleator._typing import Array, Tree


def documents(source: Any, num_words: int | None = None, length: int | None = None) -> dict[str, np.ndarray]:
    """Documents as rows: {"word": (N, L) int32, "count": (N, L) float32}, each row's different words and how often, padded with count 0.

    source: a SciPy sparse matrix or an array of counts (N, V), or a list of documents, each a list of word numbers; or rows made before.
    num_words: V, to check word numbers against. length: L, at least the most different words of one document (None: that); batches of a
    stream must agree on it.

    >>> rows = documents([[2, 0, 2], []])
    >>> rows["word"].tolist(), rows["count"].tolist()
    ([[0, 2], [0, 0]], [[1.0, 2.0], [0.0, 0.0]])
    """
    if isinstance(source, dict):
        return source
    if hasattr(source, "tocsr"):
        table = source.tocsr().copy()
        table.sum_duplicates()
        table.eliminate_zeros()
        bounds, words, counts = table.indptr, table.indices, np.asarray(table.data, np.float64)
        _check_counts(counts)
        width = table.shape[1]
    elif isinstance(source, (np.ndarray, jax.Array)):
        dense = np.asarray(source)
        if dense.ndim != 2 or dense.dtype.kind not in "fiub":
            got = f"shape {dense.shape}, dtype {dense.dtype}"
            raise DataError(
                message("These are not documents.", got, "counts of shape (N, V)", "pass one row a document, one column a word")
            )
        _check_counts(dense)
        row, words = np.nonzero(dense)
        counts, bounds, width = dense[row, words], np.searchsorted(row, np.arange(len(dense) + 1)), dense.shape[1]
    else:
        parts = [_unique(document, number) for number, document in enumerate(source)]
        bounds = np.cumsum([0] + [len(words) for words, _ in parts])
        words = np.concatenate([words for words, _ in parts]) if parts else np.zeros(0, np.int32)
        counts = np.concatenate([numbers for _, numbers in parts]) if parts else np.zeros(0)
        width = int(words.max()) + 1 if words.size else 0
    if len(bounds) < 2:
        raise DataError(message("There are no documents.", "nothing", "at least one", "check how the corpus was read"))
    if num_words is not None and (width > num_words if not words.size else words.max() >= num_words):
        raise DataError(
            message(
                "A word is not in the vocabulary.",
                f"number {int(words.max())}",
                f"0 … {num_words - 1}",
                "raise num_words, or drop the word",
            )
        )
    lengths = np.diff(bounds)
    longest = max(int(lengths.max()), 1)
    if length is not None and longest > length:
        raise DataError(message("A document is too long.", f"{longest} different words", f"at most length={length}", "raise length"))
    shape = (len(lengths), longest if length is None else length)
    place = np.arange(shape[1]) < lengths[:, None]
    word, count = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    word[place], count[place] = words, counts
    return {"word": word, "count": count}


def _unique(document: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    words = np.asarray(document)
    if words.size and (words.ndim != 1 or words.dtype.kind not in "iu" or words.min() < 0):
        raise DataError(
            message(f"Document {number} is not a list of word numbers.", repr(document)[:60], "whole numbers ≥ 0", "number the words first")
        )
    return np.unique(words.astype(np.int64), return_counts=True)


def _check_counts(counts: np.ndarray) -> None:
    bad = ~(np.isfinite(counts) & (counts >= 0) & (counts == np.floor(counts)))
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            message(
                "Words are counted in whole numbers.",
                f"{float(counts[where]):g} at index {where}",
                "whole numbers ≥ 0",
                "pass counts, not shares",
            )
        )


def check_documents(y: Any, num_words: int | None) -> int:
    """Refuse what is not rows of documents; the largest word number + 1 otherwise."""
    dense = not isinstance(y, dict)
    if (dense and np.ndim(y) != 2) or (not dense and (set(y) != {"word", "count"} or np.shape(y["word"]) != np.shape(y["count"]))):
        got = "no y" if y is None else f"shape {np.shape(y)}" if dense else str({name: np.shape(leaf) for name, leaf in y.items()})
        raise DataError(
            message(
                "These are not documents.",
                got,
                '{"word": (N, L), "count": (N, L)} or counts (N, V)',
                "make them with al.latent.documents(…)",
            )
        )
    counts = np.asarray(y if dense else y["count"])
    _check_counts(counts)
    if not counts.any():
        raise DataError(
            message("No document has a word.", f"{len(counts)} empty documents", "at least one word", "check how the corpus was read")
        )
    if dense:
        size = counts.shape[1]
    else:
        word = np.asarray(y["word"])
        if word.dtype.kind not in "iu" or word.min() < 0:
            got = f"dtype {word.dtype}, smallest {word.min()}"
            raise DataError(message("Words are numbered.", got, "whole numbers ≥ 0", "make them with al.latent.documents(…)"))
        size = int(word[counts > 0].max()) + 1
    if num_words is not None and size > num_words:
        raise DataError(
            message("A word is not in the vocabulary.", f"number {size - 1}", f"0 … {num_words - 1}", "raise num_words, or drop the word")
        )
    return size


def entries(y: Tree) -> tuple[Array | None, Array]:
    """(word numbers, counts) of rows; (None, counts of all words) of a matrix."""
    if isinstance(y, dict):
        return y["word"], y["count"].astype(jnp.result_type(float))
    return None, jnp.asarray(y).astype(jnp.result_type(float))
