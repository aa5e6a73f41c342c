"""Corpora: vocabularies, public and own files, fetching, the generated corpus."""

from __future__ import annotations

import hashlib
import math
import random
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

pytest.importorskip("pooch")

from revrnn.recipes import corpora, grammar
from revrnn.recipes.errors import RecipeError


def write(folder: Path, **texts: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in texts.items():
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return write(tmp_path / "own", train="b a\na c\n", valid="c b\n", test="a\n")


# -- own texts ------------------------------------------------------------------------------------


def test_words_are_numbered_as_they_appear(own: Path) -> None:
    corpus = corpora.load(str(own))
    assert corpus.name == "own"
    assert corpus.vocabulary.words == ["b", "a", "<eos>", "c"]
    assert corpus.train.tolist() == [0, 1, 2, 1, 3, 2]
    assert corpus.valid.tolist() == [3, 0, 2]
    assert corpus.test.dtype == torch.int64
    assert corpus.vocabulary.text([0, 1, 2, 1, 3, 2]) == "b a\na c\n"
    assert corpus.vocabulary.text([2, 0, 2, 2, 1]) == "\nb\n\na"


def test_names_as_of_the_penn_treebank_do_too(own: Path) -> None:
    for split in corpora.SPLITS:
        (own / f"{split}.txt").rename(own / f"ptb.{split}.txt")
    assert len(corpora.load(str(own)).vocabulary) == 4


def test_words_only_seen_in_evaluation_are_unknown(own: Path) -> None:
    before = corpora.load(str(own)).fingerprint
    write(own, test="a new word\n")
    corpus = corpora.load(str(own))
    assert corpus.vocabulary.words[-1] == "<unk>"
    assert corpus.test.tolist() == [1, 4, 4, 2]
    assert corpus.fingerprint != before


def test_an_unknown_word_in_a_prompt(own: Path) -> None:
    vocabulary = corpora.load(str(own)).vocabulary
    with pytest.raises(RecipeError, match=r"the word 'zebra' is not in the vocabulary of 4 words"):
        vocabulary.ids(["a", "zebra"])


def test_the_fingerprint_knows_where_texts_end(own: Path) -> None:
    before = corpora.load(str(own))
    train = (own / "train.txt").read_text().splitlines(keepends=True)
    valid = (own / "valid.txt").read_text()
    (own / "train.txt").write_text("".join(train[:-1]))
    (own / "valid.txt").write_text(train[-1] + valid)
    after = corpora.load(str(own))
    assert torch.equal(
        torch.cat((after.train, after.valid)), torch.cat((before.train, before.valid))
    )
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_corpus(own: Path, text: str) -> None:
    write(own, valid=text)
    with pytest.raises(RecipeError, match=r"valid\.txt is empty"):
        corpora.load(str(own))


def test_files_that_are_missing_or_no_text(own: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no corpus and no folder"):
        corpora.load(str(tmp_path / "nowhere"))
    (own / "test.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match=r"test\.txt is no UTF-8 text"):
        corpora.load(str(own))
    (own / "test.txt").unlink()
    with pytest.raises(RecipeError, match=r"has no test\.txt and no ptb\.test\.txt"):
        corpora.load(str(own))


def test_columns() -> None:
    table = corpora.columns(torch.arange(11), 3)
    assert table.tolist() == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    with pytest.raises(RecipeError, match="the valid text has 5 tokens, too few for 3 rows"):
        corpora.columns(torch.arange(5), 3, "valid")


# -- public texts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "words"), [("ptb", 10_000), ("wikitext2", 33_278)])
def test_the_public_corpora(name: str, words: int) -> None:
    try:
        corpus = corpora.load(name)
    except RecipeError as error:
        pytest.skip(str(error))
    assert len(corpus.vocabulary) == words
    assert "<unk>" in corpus.vocabulary.words
    assert "<eos>" in corpus.vocabulary.words
    for split, tokens in corpora.KNOWN[name].tokens.items():
        assert len(getattr(corpus, split)) == tokens


SMALL = {"train": "b a\na c\n", "valid": "c b\n", "test": "a\n"}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> corpora.Known:
    """A small corpus in the place of the Penn Treebank, not there yet."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv("REVRNN_DATA", str(folder))
    known = replace(corpora.KNOWN["ptb"], tokens={"train": 6, "valid": 3, "test": 2})
    monkeypatch.setitem(corpora.KNOWN, "ptb", known)
    return known


def put(tmp_path: Path, texts: dict[str, str]) -> Path:
    folder = tmp_path / "data" / "ptb"
    return write(folder, **{f"ptb.{split}": text for split, text in texts.items()})


def test_public_files_that_are_not_there(small: corpora.Known) -> None:
    with pytest.raises(RecipeError, match=r"missing: run `revrnn data fetch ptb`"):
        corpora.load("ptb")


def test_public_files_that_are_truncated(small: corpora.Known, tmp_path: Path) -> None:
    put(tmp_path, SMALL | {"train": "b a\n"})
    with pytest.raises(RecipeError, match="has 3 tokens where ptb has 6: it is truncated"):
        corpora.load("ptb")


def test_public_files_of_another_hash(small: corpora.Known, tmp_path: Path) -> None:
    folder = put(tmp_path, SMALL)
    corpora._record(folder.parent, [folder / "ptb.train.txt"])
    assert len(corpora.load("ptb").vocabulary) == 4
    put(tmp_path, {"train": "a b\na c\n"})
    with pytest.raises(RecipeError, match=r"train\.txt is not the file whose SHA-256"):
        corpora.load("ptb")


def test_a_data_folder_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REVRNN_DATA", str(tmp_path / "gone"))
    with pytest.raises(RecipeError, match=r"REVRNN_DATA names .*, which is no folder"):
        corpora.load("ptb")


# -- fetching -------------------------------------------------------------------------------------


class Server(ThreadingHTTPServer):
    """Serves files from memory; `breaks` more answers break off in the middle."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.breaks = 0
        self.ranges: list[str | None] = []

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Answer(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        data = self.server.files[self.path.strip("/")]
        asked = self.headers.get("Range")
        self.server.ranges.append(asked)
        first = int(re.findall(r"\d+", asked)[0]) if asked else 0
        if first and first >= len(data):
            self.send_error(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        data = data[first:]
        if self.server.breaks:
            self.server.breaks -= 1
            data = data[: len(data) // 2]
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def serve(
    server: Server,
    known: corpora.Known,
    monkeypatch: pytest.MonkeyPatch,
    texts: Mapping[str, str] = SMALL,
) -> None:
    sources = []
    for split, text in texts.items():
        name, data = known.files[split], text.encode()
        server.files[name] = data
        sources.append(corpora.Source([server.url(name)], hashlib.sha256(data).hexdigest(), {}))
    monkeypatch.setitem(corpora.KNOWN, "ptb", replace(known, sources=sources))


def test_fetch(server: Server, small: corpora.Known, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(server, small, monkeypatch)
    folder = corpora.fetch("ptb")
    assert corpora.load("ptb").vocabulary.words == ["b", "a", "<eos>", "c"]
    assert {path.name for path in folder.iterdir()} == set(small.files.values())
    assert corpora.fetch("ptb") == folder
    assert server.ranges == [None] * 3


def test_fetch_goes_on_where_it_broke_off(
    server: Server, small: corpora.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"{number}\n" for number in range(20_000))
    serve(server, small, monkeypatch, SMALL | {"train": text})
    server.breaks = 1
    with pytest.raises(RecipeError, match=r"did not answer .*: try again later"):
        corpora.fetch("ptb")
    folder = corpora.fetch("ptb")
    first, second, *_ = server.ranges
    assert first is None
    assert second is not None
    assert len(text) / 4 < int(second.removeprefix("bytes=").removesuffix("-")) <= len(text) / 2
    assert (folder / "ptb.train.txt").read_text() == text


def test_fetch_of_a_file_that_was_only_not_renamed(
    server: Server, small: corpora.Known, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve(server, small, monkeypatch)
    (put(tmp_path, {}) / "ptb.train.txt.part").write_text(SMALL["train"])
    corpora.fetch("ptb")
    assert len(corpora.load("ptb").train) == 6


def test_fetch_of_a_file_with_another_hash(
    server: Server, small: corpora.Known, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(server, small, monkeypatch)
    server.files["ptb.train.txt"] = b"something else\n"
    with pytest.raises(RecipeError, match="gave a file with another SHA-256"):
        corpora.fetch("ptb")
    serve(server, small, monkeypatch)
    corpora.fetch("ptb")


def test_fetch_from_a_zip_file_and_a_second_address(
    server: Server, small: corpora.Known, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with ZipFile(tmp_path / "all.zip", "w") as archive:
        for split, text in SMALL.items():
            archive.writestr(f"inside/{split}.tokens", text)
    data = (tmp_path / "all.zip").read_bytes()
    server.files["all.zip"] = data
    members = {f"inside/{split}.tokens": small.files[split] for split in SMALL}
    urls = ["http://127.0.0.1:9/all.zip", server.url("all.zip")]
    source = corpora.Source(urls, hashlib.sha256(data).hexdigest(), members)
    monkeypatch.setitem(corpora.KNOWN, "ptb", replace(small, sources=[source]))
    folder = corpora.fetch("ptb")
    assert {path.name for path in folder.iterdir()} == set(small.files.values())
    assert len(corpora.load("ptb").train) == 6


def test_fetch_of_what_there_is_not() -> None:
    with pytest.raises(RecipeError, match="no corpus 'demo' to fetch: choose ptb or wikitext2"):
        corpora.fetch("demo")


# -- the generated corpus -------------------------------------------------------------------------


def test_the_grammar_yields_distributions() -> None:
    rng = random.Random(0)
    rules = grammar.text()
    distribution = next(rules)
    for _ in range(20_000):
        assert math.fsum(distribution.values()) == pytest.approx(1)
        assert all(chance > 0 for chance in distribution.values())
        (word,) = rng.choices(tuple(distribution), tuple(distribution.values()))
        distribution = rules.send(word)


def test_generated_texts_cost_what_the_rules_say() -> None:
    text = grammar.generate(0, 5000)
    assert grammar.generate(0, 5000) == text
    assert grammar.generate(1, 5000) != text
    assert text.words[-1] == "<eos>"
    assert grammar.score(text.words) == text.bits
    assert text.perplexity == pytest.approx(2 ** (sum(text.bits) / len(text.bits)))


def lines(text: str) -> list[str]:
    return [word for line in text.splitlines() for word in [*line.split(), "<eos>"]]


TALE = """a tale of <io> at the farm :
the old goats that the hen that the dogs follow sees sleep again , says <io> .
so ends the tale of <io> .
"""


def test_agreement_in_generated_texts() -> None:
    assert all(map(math.isfinite, grammar.score(lines(TALE))))
    for right, wrong in [
        ("sleep", "sleeps"),  # the verb of a subject nine words before
        ("sees", "see"),
        ("follow", "follows"),
        ("says <io>", "says <juno>"),
        ("tale of <io> .", "tale of <juno> ."),
        ("dogs", "kings"),  # not at the farm
    ]:
        assert not math.isfinite(grammar.score(lines(TALE.replace(right, wrong)))[-1])


def test_the_entropy_of_the_generated_corpus() -> None:
    """Of a long text it is the same for any seed, and the corpus tells that of its own texts."""
    corpus = corpora.demo()
    assert set(corpus.entropy) == set(corpora.SPLITS)
    assert corpus.entropy["valid"] == pytest.approx(corpus.entropy["train"], rel=0.02)
    ids = corpus.valid.tolist()
    words = [corpus.vocabulary.words[index] for index in ids]
    assert sum(grammar.score(words)) / len(words) == pytest.approx(corpus.entropy["valid"])
    assert "<unk>" not in corpus.vocabulary.words
