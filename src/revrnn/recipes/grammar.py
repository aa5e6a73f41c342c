"""A corpus that is generated, with agreement over long distances and an entropy that is known.

A text is a sequence of tales such as

    a tale of <eris> at the harbour :
    the old sailors that the captain calls smile gladly .
    the captain sings , says <eris> .
    so ends the tale of <eris> .

- Verbs agree in number with their subjects, and relative clauses nest: the last subject that has no
  verb yet is the first to get one.
- A tale's place says which nouns it uses. The name that it is about comes back after "says", and at
  its very end. Both are worth nothing once the tale is over: place and name of the next one are
  drawn anew.

The rules are written once, as a coroutine that yields the distribution of the next word and is sent
the word that came. Every choice the rules make is the choice of a word, so that whoever knows the
rules and the words so far knows the distribution of the next: the sum of ``-log2 p`` over a text is
what the best possible model pays for it, in bits.
"""

from __future__ import annotations

import math
import random
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

EOS = "<eos>"

NAMES = tuple(
    f"<{name}>"
    for name in (
        *("eris", "juno", "pan", "leto", "vesta", "midas", "circe", "argus"),
        *("dido", "hero", "janus", "rhea", "selene", "talos", "io", "orion"),
    )
)
NOUNS = {
    "harbour": ("sailor", "captain", "gull", "pilot", "diver", "trader"),
    "forest": ("hunter", "wolf", "owl", "badger", "fox", "ranger"),
    "palace": ("king", "guard", "jester", "cook", "page", "duke"),
    "market": ("baker", "thief", "weaver", "beggar", "potter", "buyer"),
    "school": ("teacher", "pupil", "writer", "singer", "painter", "reader"),
    "farm": ("farmer", "goat", "hen", "shepherd", "dog", "miller"),
}
"""The nouns of each place; the plural has an "s" behind."""

ADJECTIVES = ("old", "young", "clever", "tired", "quiet", "proud")
TRANSITIVE = ("call", "see", "follow", "know", "help", "fear")
INTRANSITIVE = ("sleep", "sing", "wait", "smile", "leave", "dance")
"""The plural; the singular has an "s" behind."""
ADVERBS = ("gladly", "slowly", "again", "today")

ADJECTIVE = 0.3
"""The chance of an adjective before a noun."""
CLAUSE = (0.35, 0.25, 0.1, 0.0)
"""The chance that a noun has a relative clause, by how many clauses are open around it."""
ADVERB = 0.3
SAYS = 0.5
"""The chance that a sentence ends with who says it."""
END = 0.15
"""The chance that a tale ends after a sentence."""

Distribution: TypeAlias = dict[str, float]
Rule: TypeAlias = Generator[Distribution, str, str]
"""Yields the distribution of the next word, is sent that word, and returns the last one it got."""


def _uniform(words: Sequence[str], chance: float = 1.0) -> Distribution:
    return dict.fromkeys(words, chance / len(words))


def _say(*words: str) -> Rule:
    """Words that cannot be any others."""
    for word in words:
        yield {word: 1.0}
    return words[-1]


def text() -> Rule:
    """Tale after tale, without end."""
    while True:
        yield from _tale()


def _tale() -> Rule:
    yield from _say("a", "tale", "of")
    name = yield _uniform(NAMES)
    yield from _say("at", "the")
    place = yield _uniform(tuple(NOUNS))
    yield from _say(":", EOS)
    word = yield {"the": 1.0}
    while word == "the":
        yield from _sentence(name, NOUNS[place])
        word = yield {"the": 1 - END, "so": END}
    return (yield from _say("ends", "the", "tale", "of", name, ".", EOS))


def _sentence(name: str, nouns: Sequence[str]) -> Rule:
    """A sentence whose "the" has been said."""
    yield from _subject(nouns, depth=0, verbs=INTRANSITIVE)
    rest = 1 - ADVERB
    word = yield _uniform(ADVERBS, ADVERB) | {",": rest * SAYS, ".": rest * (1 - SAYS)}
    if word in ADVERBS:
        word = yield {",": SAYS, ".": 1 - SAYS}
    if word == ",":
        yield from _say("says", name, ".")
    return (yield from _say(EOS))


def _subject(nouns: Sequence[str], depth: int, verbs: Sequence[str]) -> Rule:
    """After "the": adjective, noun, relative clause, and the verb that agrees with the noun."""
    singular, plural = tuple(nouns), tuple(noun + "s" for noun in nouns)
    heads = singular + plural
    word = yield _uniform(ADJECTIVES, ADJECTIVE) | _uniform(heads, 1 - ADJECTIVE)
    if word in ADJECTIVES:
        word = yield _uniform(heads)
    agreeing = verbs if word in plural else tuple(verb + "s" for verb in verbs)
    clause = CLAUSE[depth]
    word = yield _uniform(agreeing, 1 - clause) | ({"that": clause} if clause else {})
    if word == "that":
        yield {"the": 1.0}
        yield from _subject(nouns, depth + 1, TRANSITIVE)
        word = yield _uniform(agreeing)
    return word


@dataclass(frozen=True)
class Text:
    """Words, and the bits that each costs whoever knows the rules: ``-log2 p``."""

    words: list[str]
    bits: list[float]

    @property
    def entropy(self) -> float:
        """Bits a word, of this very text."""
        return math.fsum(self.bits) / len(self.bits)

    @property
    def perplexity(self) -> float:
        """What the best possible model reaches: ``2 ** entropy``."""
        return float(2**self.entropy)


def generate(seed: int, words: int) -> Text:
    """A text of at least so many words, up to the end of a line."""
    rng = random.Random(seed)
    rules = text()
    said: list[str] = []
    bits: list[float] = []
    distribution = next(rules)
    while len(said) < words or said[-1] != EOS:
        (word,) = rng.choices(tuple(distribution), tuple(distribution.values()))
        said.append(word)
        bits.append(-math.log2(distribution[word]))
        distribution = rules.send(word)
    return Text(said, bits)


def score(words: Sequence[str]) -> list[float]:
    """The bits of each word of a text that begins with a tale; infinite where the rules forbid it,
    and what follows is not scored."""
    rules = text()
    distribution = next(rules)
    bits: list[float] = []
    for word in words:
        if word not in distribution:
            return [*bits, math.inf]
        bits.append(-math.log2(distribution[word]))
        distribution = rules.send(word)
    return bits
