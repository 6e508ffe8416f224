"""Whether a draft's tokenizer can serve a target, and which of their tokens are the same.

Ids may differ. What must not differ is how text is cut: a draft reads the target's tokens and
proposes such, so a token of the one has to be a token of the other. Tokens are compared by the
bytes they stand for, and control tokens by their names.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from headrace.errors import TokenizerMismatchError
from headrace.export.text import I64, Text, Token
from headrace.models.plantlog import calibration_text
from headrace.models.vocab_map import I32, NO_TOKEN, VocabMap

MAX_UNMATCHED = 0.10
"""Share of a text's draft tokens without a partner above which a pair is refused."""

Tokens = Sequence[Token | None]

HARD_STRINGS = (
    "The quick brown fox jumps over the lazy dog.",
    "I'm you're he's we'll they'd I've can't; I'M YOU'RE don\u2019t O'Neil's 'quoted'",
    "0 7 12 123 1234 12345 1234567890 3.14159 -273.15 1,234,567.89 6.02e23 0xDEADBEEF",
    "2026-08-08T05:57:29Z WARN  plc-01       PT-104 suction pressure 1.06 bar (low)",
    " leading, two  three   spaces and trailing   ",
    "\ttab\t\ttabs \t mixed",
    "one\ntwo\n\nthree\n\n\n\nfour\r\nfive\n   indented\n",
    "snake_case kebab-case CamelCase HTTPServer SCREAMING_CASE v1.2.3-rc.4+build.56",
    'def f(x: int = 0) -> str:\n    return f"{x!r:>10}"  # comment\n',
    '{"key": [1, 2.5, -3e4, null, true], "nested": {"a": ""}}',
    "https://example.com/a/b?c=d&e=%20#f user@host.example /var/log/plant.log C:\\temp",
    "!?!?!?... ===== ----- ##### (a)[b]{c}<d> $1.50 50% 5\u00b0C \u00b15 mm\u00b2 \u20ac9",
    "na\u00efve fa\u00e7ade Stra\u00dfe \u00c5ngstr\u00f6m l'\u00e9t\u00e9 se\u00f1or e\u0301",
    "\u041f\u0440\u0438\u0432\u0435\u0442, \u043c\u0438\u0440! \u0393\u03b5\u03b9\u03ac",
    "\u4f60\u597d\uff0c\u4e16\u754c\uff01\u6e29\u5ea6\u304c\u9ad8\u3044\u3002 \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e2\u05d1\u05e8\u05d9\u05ea \u0928\u092e\u0938\u094d\u0924",
    "text\U0001f600text \U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 1\ufe0f\u20e3",
    "no\u00a0break zero\u200bwidth soft\u00adhyphen",
)
"""Where tokenizers differ if they do; the built-in text is compared as well."""


def match(draft: Tokens, target: Tokens) -> VocabMap:
    """The map between two vocabularies, of whole heads. Each target token has one draft token at
    most; rows without a token have partners only where the vocabularies are the same.
    """
    to_target: I32 = np.full(len(draft), NO_TOKEN, np.int32)
    to_draft: I32 = np.full(len(target), NO_TOKEN, np.int32)
    if _same(draft, target):
        both = np.arange(min(len(draft), len(target)), dtype=np.int32)
        to_target[: len(both)] = to_draft[: len(both)] = both
        return VocabMap(to_target, to_draft)
    for key in (_exactly, _by_meaning):
        free: dict[Hashable, int] = {}
        for target_id, token in enumerate(target):
            if token is not None and to_draft[target_id] == NO_TOKEN:
                free.setdefault(key(token), target_id)
        for draft_id, token in enumerate(draft):
            if token is not None and to_target[draft_id] == NO_TOKEN:
                found = free.pop(key(token), None)
                if found is not None:
                    to_target[draft_id], to_draft[found] = found, draft_id
    _read_doubles(draft, target, to_draft)
    return VocabMap(to_target, to_draft)


def _exactly(token: Token) -> Hashable:
    return token, token.entry


def _by_meaning(token: Token) -> Hashable:
    return token


def _same(draft: Tokens, target: Tokens) -> bool:
    """Whether every id is the same entry in both; one of them may have more rows without any."""
    both = min(len(draft), len(target))
    ours, theirs = ([t and _exactly(t) for t in tokens] for tokens in (draft, target))
    return ours[:both] == theirs[:both] and not any([*ours[both:], *theirs[both:]])


def _read_doubles(draft: Tokens, target: Tokens, to_draft: I32) -> None:
    """A second target token of the same bytes is read as the first one's."""
    known = {token: draft_id for draft_id, token in enumerate(draft) if token is not None}
    for target_id, token in enumerate(target):
        if token is not None and to_draft[target_id] == NO_TOKEN and token in known:
            to_draft[target_id] = known[token]


def check_cutting(draft: Text, target: Text) -> None:
    """Raises TokenizerMismatchError unless both cut all test strings into the same pieces."""
    strings = [*HARD_STRINGS, *calibration_text().splitlines()]
    cuts = [(_cut(draft, string), _cut(target, string)) for string in strings]
    wrong = [(ours, theirs) for ours, theirs in cuts if ours != theirs]
    if wrong:
        ours, theirs = _first_difference(*wrong[0])
        raise TokenizerMismatchError(
            f"the draft {draft.name} cuts text differently from {target.name} in {len(wrong)} of "
            f"{len(strings)} test strings, e.g. {ours} where the target has {theirs}; "
            "choose a draft with the target's tokenizer"
        )


def _cut(text: Text, string: str) -> list[Token | None]:
    return [text.tokens[token_id] for token_id in text.pieces(string)]


def _first_difference(ours: Tokens, theirs: Tokens) -> tuple[str, str]:
    """A few pieces of both from where they part."""
    start = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return _shown(ours[start : start + 3]), _shown(theirs[start : start + 3])


def _shown(tokens: Tokens) -> str:
    texts = [repr(token.data.decode(errors="replace")) for token in tokens if token is not None]
    return " + ".join(texts) or "nothing"


def unmatched_share(draft: Text, target: Text, counts: I64, to_target: I32) -> float:
    """Share of the draft's tokens of a text, counted by id [vocab_size], that the target lacks.

    Raises TokenizerMismatchError above MAX_UNMATCHED.
    """
    missing: npt.NDArray[np.int64] = np.where(to_target == NO_TOKEN, counts, 0)
    share = float(missing.sum() / max(1, counts.sum()))
    if share > MAX_UNMATCHED:
        common = np.argsort(-missing, kind="stable")[:5]
        examples = _list([draft.tokens[i] for i in common if missing[i]])
        raise TokenizerMismatchError(
            f"{share:.0%} of the tokens that the draft {draft.name} cuts a text into are none of "
            f"{target.name}'s, e.g. {examples}; at most {MAX_UNMATCHED:.0%} may be: choose a draft "
            "with the target's tokenizer"
        )
    return share


def _list(tokens: Tokens) -> str:
    return ", ".join(_shown([token]) for token in tokens)
