"""Byte-level BPE trained on the training split, exact on every text.

The alphabet holds all 256 bytes, so any UTF-8 text encodes and decodes to the same bytes. Text that spells a special
token is encoded as ordinary text: no document can forge the end of a document.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain, groupby, islice, pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as _Tokenizer

from trine.data._errors import DataError
from trine.data._files import write_atomically

END_OF_DOCUMENT = "<|eod|>"
SMALLEST_VOCABULARY = 256
# Words and numbers with the mark or space before them; runs of marks; a line's end with the indentation of the next
# line, which is most of what code is laid out with. On a standard library 7 % more bytes a token than GPT-2's pattern.
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}]+"
    r"| ?[\p{N}]{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]+[ \t]*"
    r"|\s*[\r\n]+[ \t]*"
    r"| ?[^\s\p{L}\p{N}]+"
    r"|\s+(?!\S)|\s+"
)
_ASCII_PATTERN = PATTERN.replace(r"\p{L}", "A-Za-z").replace(r"\p{N}", "0-9")
_REMEMBERED_WORDS = 1 << 20
# Runs of characters beyond ASCII whose classes have not changed since Unicode 5, so that Python and the library agree
# on them whatever their versions: Latin, Greek and Cyrillic letters, kana, ideographs, Hangul, and common marks.
_SETTLED = (
    *((0xA1, 0x24F), (0x391, 0x3A1), (0x3A3, 0x3CE), (0x400, 0x481), (0x2010, 0x2027), (0x2190, 0x21FF)),
    *((0x2500, 0x257F), (0x3001, 0x3003), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3)),
)
_LEARNT_WORD = 128
_is_marks = re.compile(r"(?:[^\w\s]|_)+").fullmatch
_SPACE = r" \t\n\r\f\v"
# A line with the blank lines and the indentation after it: a word always begins where the next one does, unless that
# begins with another kind of space.
_LINES = r"[^\n]*\n[ \t\n]*(?:[^\S \t\n][^\n]*(?:\n[ \t\n]*|\Z))*|[^\n]+"


@cache
def _settled_patterns() -> tuple[str, str]:
    """``PATTERN`` for Python's ``re`` on ASCII and settled characters, and what matches one such character."""
    classes: dict[str, list[tuple[int, int]]] = {"L": [], "N": []}
    for first, last in _SETTLED:
        for code in range(first, last + 1):
            ranges = classes.get(unicodedata.category(chr(code))[0])
            if ranges is None:
                continue
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1] = (ranges[-1][0], code)
            else:
                ranges.append((code, code))
    letters, numbers = ("".join(f"{chr(a)}-{chr(b)}" for a, b in classes[kind]) for kind in "LN")
    pattern = (
        PATTERN.replace(r"(?!\S)", f"(?![^{_SPACE}])").replace(r"[^\s", f"[^{_SPACE}").replace(r"\s", f"[{_SPACE}]")
    )
    pattern = pattern.replace(r"\p{L}", "A-Za-z" + letters).replace(r"\p{N}", "0-9" + numbers)
    return pattern, r"[\x00-\x7f" + "".join(f"{chr(a)}-{chr(b)}" for a, b in _SETTLED) + "]"


def _byte_of_symbol() -> dict[str, int]:
    """The byte each symbol of a byte-level vocabulary stands for: printable Latin-1 itself, the rest from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


_SYMBOL_BYTES = _byte_of_symbol()
_SYMBOL_OF_BYTE = {byte: symbol for symbol, byte in _SYMBOL_BYTES.items()}


def _pieces(text: str) -> list[str]:
    """A text, cut inside runs of letters, spaces or marks so long that the trainer would take hours over them.

    It rewrites a word for each of its pairs, so its time is the square of a word's length. Windows that lie wholly in
    such a run end a piece; other text, all that people write, is left whole, and so is its vocabulary.
    """
    cuts = [0]
    for end in range(_LEARNT_WORD, len(text), _LEARNT_WORD):
        window = text[end - _LEARNT_WORD : end]
        if window.isalpha() or window.isspace() or _is_marks(window):
            cuts.append(end)
    return [text[a:b] for a, b in pairwise([*cuts, len(text)])] if len(cuts) > 1 else [text]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    """Words by ``PATTERN``, then their bytes."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


class _Numbers(dict[str, int]):
    """Numbers words in the order in which they are first asked for."""

    def __missing__(self, word: str) -> int:
        number = self[word] = len(self)
        return number


class _Words:
    """Encodes by looking words up, since almost all of the library's time goes into finding them.

    BPE works inside one match of ``PATTERN`` at a time, so the ids of a text are the ids of its words in a row.
    Python's own ``re`` finds the words of ASCII text and of other text whose characters mean the same to both; lines
    with any other character go through the library.
    """

    def __init__(self, inner: _Tokenizer) -> None:
        """Words of ``inner``, whose pre-tokenizer must be ``_pre_tokenizer()``."""
        self._model = _Tokenizer(inner.model)  # without a pre-tokenizer: what it is given are words
        self._find = re.compile(_ASCII_PATTERN, re.ASCII).findall
        pattern, character = _settled_patterns()
        self._find_settled = re.compile(pattern).findall
        self._is_settled = re.compile(f"{character}*").fullmatch
        self._lines = re.compile(_LINES).findall
        self._split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated").pre_tokenize_str
        self._forget()

    def _forget(self) -> None:
        """Start without a word."""
        self._number = _Numbers()
        self._sizes = np.zeros(0, dtype=np.int64)  # ids of each word ...
        self._flat = np.zeros(0, dtype=np.int64)  # ... and all of them in a row

    def encode(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of each text, int64."""
        if self._sizes.size > _REMEMBERED_WORDS:
            self._forget()
        numbers = [self._numbers(text) for text in texts]
        # New words of all texts at once: the library spreads a large batch over the cores.
        new = list(islice(self._number, self._sizes.size, None))
        if new:
            symbols = [word.encode().decode("latin-1").translate(_SYMBOL_OF_BYTE) for word in new]
            ids = [one.ids for one in self._model.encode_batch_fast(symbols, add_special_tokens=False)]
            self._sizes = np.concatenate([self._sizes, np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))])
            more = int(self._sizes.sum()) - self._flat.size
            self._flat = np.concatenate([self._flat, np.fromiter(chain.from_iterable(ids), dtype=np.int64, count=more)])
        starts = np.cumsum(self._sizes) - self._sizes
        found = []
        for number in numbers:
            size = self._sizes[number]
            first = np.cumsum(size) - size
            found.append(self._flat[np.arange(int(size.sum())) + np.repeat(starts[number] - first, size)])
        return found

    def _numbers(self, text: str) -> NDArray[np.int64]:
        """The words of a text, each as its number here."""
        words = self._find(text) if text.isascii() else self._find_any(text)
        return np.fromiter(map(self._number.__getitem__, words), dtype=np.int64, count=len(words))

    def _find_any(self, text: str) -> list[str]:
        """The words of a text with other characters than ASCII."""
        if self._is_settled(text):
            return self._find_settled(text)
        words: list[str] = []
        for settled, lines in groupby(self._lines(text), key=lambda line: bool(self._is_settled(line))):
            stretch = "".join(lines)
            words += self._find_settled(stretch) if settled else [word for word, _ in self._split(stretch)]
        return words


class Tokenizer:
    """A byte-level BPE vocabulary and what the rest of the package needs to know about it.

    Attributes:
        vocab_size: number of ids, special tokens included.
        eod_id: id of the end-of-document token.
        token_bytes: the bytes each id stands for; empty for special tokens.
        byte_lengths: int32 [vocab_size], their lengths.
    """

    def __init__(self, inner: _Tokenizer) -> None:
        """Wrap a ``tokenizers`` object. Raises DataError when it is no byte-level vocabulary with the end token."""
        inner.encode_special_tokens = True
        self._inner = inner
        self.vocab_size: int = inner.get_vocab_size()
        eod = inner.token_to_id(END_OF_DOCUMENT)
        if eod is None:
            raise DataError(f"tokenizer: has no token {END_OF_DOCUMENT}")
        self.eod_id: int = eod
        special = set(inner.get_added_tokens_decoder())
        table: list[bytes] = []
        for index in range(self.vocab_size):
            token = inner.id_to_token(index)
            if token is None:
                raise DataError(f"tokenizer: id {index} has no token, need ids 0 to {self.vocab_size - 1} without gaps")
            try:
                table.append(b"" if index in special else bytes(_SYMBOL_BYTES[symbol] for symbol in token))
            except KeyError as error:
                raise DataError(f"tokenizer: token {token!r} (id {index}) is not byte-level") from error
        self.token_bytes: tuple[bytes, ...] = tuple(table)
        self.byte_lengths: NDArray[np.int32] = np.array([len(b) for b in table], dtype=np.int32)
        self._table = np.array(table, dtype=object)
        ours = _Tokenizer(models.BPE())
        ours.pre_tokenizer = _pre_tokenizer()
        same = json.loads(inner.to_str())["pre_tokenizer"] == json.loads(ours.to_str())["pre_tokenizer"]
        self._words = _Words(inner) if same else None

    @classmethod
    def train(
        cls, texts: Iterable[str], vocab_size: int = 4096, special_tokens: Sequence[str] = (END_OF_DOCUMENT,)
    ) -> Tokenizer:
        """Learn a vocabulary of exactly ``vocab_size`` ids; the same texts in any order give the same vocabulary.

        Special tokens get the first ids, the 256 bytes the next. From words of over 128 characters pieces are learnt:
        see ``_pieces``.

        Raises:
            DataError: a vocabulary too small for the bytes, no end token, or texts too few to fill the vocabulary.
        """
        least = SMALLEST_VOCABULARY + len(special_tokens)
        if vocab_size < least:
            raise DataError(f"vocab_size: found {vocab_size}, need at least {least} (256 bytes and the special tokens)")
        if END_OF_DOCUMENT not in special_tokens:
            raise DataError(f"special_tokens: found {list(special_tokens)}, need {END_OF_DOCUMENT} among them")
        inner = _Tokenizer(models.BPE())
        inner.pre_tokenizer = _pre_tokenizer()
        inner.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=sorted(_SYMBOL_BYTES),
            show_progress=False,
        )
        inner.train_from_iterator(chain.from_iterable(map(_pieces, texts)), trainer=trainer)
        if inner.get_vocab_size() != vocab_size:
            raise DataError(
                f"vocab_size: the training texts fill only {inner.get_vocab_size()} ids, found {vocab_size}; "
                "take a smaller vocabulary or more text"
            )
        return cls(inner)

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Read a ``tokenizer.json``. Raises DataError when it is absent or damaged."""
        try:
            return cls(_Tokenizer.from_str(Path(path).read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(f"tokenizer {path}: cannot be read ({error.strerror})") from error
        except DataError as error:
            raise DataError(f"tokenizer {path}: {error}") from error
        except Exception as error:  # the library raises bare Exception for damaged files
            raise DataError(f"tokenizer {path}: damaged ({str(error).splitlines()[0]})") from error

    def save(self, path: str | Path) -> None:
        """Write ``tokenizer.json``, whole or not at all."""
        write_atomically(Path(path), self.to_json().encode())

    def to_json(self) -> str:
        """The text of ``tokenizer.json``."""
        return str(self._inner.to_str(pretty=True))

    @property
    def sha256(self) -> str:
        """Hash of ``tokenizer.json``."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special tokens. Raises DataError for text that is not UTF-8 (a lone surrogate)."""
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[np.int64]]:
        """Ids of many texts, int64 each, without special tokens.

        Equal to what ``tokenizers`` gives for the whole text, at several times its speed: see ``_Words``.

        Raises:
            DataError: text that is not valid Unicode (a lone surrogate).
        """
        for i, text in enumerate(texts):
            if not text.isascii():
                try:
                    text.encode()
                except UnicodeEncodeError as error:
                    raise DataError(f"text {i}: not valid Unicode at character {error.start}") from error
        if self._words is not None:
            return self._words.encode(texts)
        found = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int64) for one in found]

    def decode_bytes(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The bytes that ids stand for, exactly, also in the middle of a character; special tokens give none."""
        index = np.asarray(ids, dtype=np.int64).reshape(-1)
        if index.size and (index.min() < 0 or index.max() >= self.vocab_size):
            bad = int(index[(index < 0) | (index >= self.vocab_size)][0])
            raise DataError(f"token ids: found {bad}, need 0 to {self.vocab_size - 1}")
        return b"".join(self._table[index].tolist())

    def decode(self, ids: Sequence[int] | NDArray[np.integer], errors: str = "replace") -> str:
        """Text of ids; bytes that are not UTF-8 are handled as ``errors`` says."""
        return self.decode_bytes(ids).decode("utf-8", errors)
