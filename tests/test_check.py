"""`headrace check --lossless`: all is well with the tiny pair, and it can say that it is not."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commandline import CommandLine, Result

from headrace.runtime import verify
from headrace.runtime.batch import F32, LaneRows
from headrace.runtime.lossless import LEAST_FIT, Case, cases, level, prompts
from headrace.runtime.ort import OrtBackend
from headrace.runtime.request import Alternative, TokenLogprob
from headrace.runtime.sampling import Choice, Row, Sampler, TokenCounts
from headrace.runtime.verify import Sibling

TEXTS = ("x y x y x y x y x y", "pump 3 low, pump 3 low, pump")


@pytest.fixture
def files(tmp_path: Path) -> list[str | Path]:
    """The flags that name the prompts."""
    flags: list[str | Path] = []
    for i, text in enumerate(TEXTS):
        path = tmp_path / f"prompt{i}"
        path.write_text(text)
        flags += ["--prompts", path]
    return flags


def check(command: CommandLine, bundle: Path, *flags: str | Path) -> Result:
    return command("check", bundle, "--lossless", *flags)


@pytest.mark.parametrize("name", ["twin_bundle", "tiny_bundle"])
def test_promises_are_kept(
    command: CommandLine, files: list[str | Path], name: str, request: pytest.FixtureRequest
) -> None:
    """With a draft and without; in a JSON object all that the table has, and more."""
    bundle = request.getfixturevalue(name)
    result = check(command, bundle, *files, "--max-tokens", "24", "--json")
    assert result.code == 0, result.err
    found = json.loads(result.out)
    assert found["holds"] is True
    sources = {entry["case"]["source"] for entry in found["cases"]}
    assert sources == ({"all", "draft", "lookup"} if name == "twin_bundle" else {"lookup"})
    promised = [
        entry
        for entry in found["cases"]
        if entry["case"]["exactness"] == "exact" and entry["case"]["accept"] == "coupled"
    ]
    assert [entry["num_same"] for entry in promised] == [2] * len(promised)
    if name == "twin_bundle":
        assert sum(entry["num_accepted"] for entry in promised) > 0
    assert "ways to decode" in result.err


def spoilt(
    sampler: Sampler, row: Row, position: int, counts: TokenCounts, siblings: Iterable[Sibling]
) -> tuple[Choice, Sibling | None]:
    """The unlikeliest token wherever something is proposed."""
    if list(siblings):
        return sampler.report(row, int(row.argmin())), None
    return sampler.choose(row, position, counts), None


def biased(
    sampler: Sampler, row: Row, position: int, counts: TokenCounts, siblings: Iterable[Sibling]
) -> tuple[Choice, Sibling | None]:
    """The likeliest token at every other place, whatever is proposed."""
    if position % 2:
        return sampler.report(row, int(row.argmax())), None
    return sampler.choose(row, position, counts), None


def test_a_wrong_rule_is_found(
    command: CommandLine,
    twin_bundle: Path,
    files: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And the first difference named."""
    monkeypatch.setitem(verify.RULES, "coupled", spoilt)
    result = check(command, twin_bundle, *files, "--max-tokens", "24")
    assert result.code == 1
    assert "BROKEN" in result.out and "holds" in result.out
    words = (
        r"first difference: \S+prompt\d, token \d+: plain '.*' \(id \d+, logprob -\S+\), found '"
    )
    assert re.search(words, result.err), result.err
    assert "Traceback" not in result.err


def test_a_wrong_distribution_is_found(
    command: CommandLine,
    twin_bundle: Path,
    files: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(verify.RULES, "rejection", biased)
    result = check(command, twin_bundle, *files, "--max-tokens", "40", "--json")
    assert result.code == 1
    broken = [entry for entry in json.loads(result.out)["cases"] if not entry["holds"]]
    assert {entry["case"]["accept"] for entry in broken} == {"rejection"}
    fits = [e["fit"] for e in broken if e["fit"] is not None]
    assert fits and max(fits) < LEAST_FIT


def test_a_backend_that_rounds_by_width_is_found(
    command: CommandLine,
    twin_bundle: Path,
    files: list[str | Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = OrtBackend.forward

    def uneven(self: OrtBackend, batch: Sequence[LaneRows]) -> F32:
        logits = forward(self, batch).copy()
        if max(len(rows.token_ids) for rows in batch) in range(3, 9):
            logits *= np.float32(1 + 2**-22)
        return logits

    monkeypatch.setattr(OrtBackend, "forward", uneven)
    result = check(command, twin_bundle, *files, "--max-tokens", "24", "--json")
    assert result.code == 1
    broken = [entry["case"] for entry in json.loads(result.out)["cases"] if not entry["holds"]]
    assert broken and {case["exactness"] for case in broken} == {"exact"}
    assert "first difference: " in result.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ((), "nothing to check"),
        (("--lossless", "--prompts", "no-such-file"), "no-such-file cannot be read"),
        (("--lossless", "--max-tokens", "1"), "--max-tokens"),
    ],
)
def test_mistakes(
    command: CommandLine, tiny_bundle: Path, flags: tuple[str, ...], words: str
) -> None:
    result = command("check", tiny_bundle, *flags)
    assert result.code == 2
    assert words in result.complaint


@pytest.mark.parametrize("strength", [1, 2, 3])
def test_cases_cover_what_they_say(strength: int) -> None:
    found = cases(has_draft=True, is_exact=True, strength=strength)
    assert len(set(found)) == len(found)
    ways = {(case.accept, case.exactness, case.source, case.mode)[:strength] for case in found}
    assert len(ways) == (2, 4, 12)[strength - 1]
    only = cases(has_draft=False, is_exact=False, strength=strength)
    assert {(c.exactness, c.source, c.is_deferred) for c in only} == {("tree", "lookup", False)}
    assert not any(case.promises_text for case in only)


def test_built_in_prompts_differ() -> None:
    assert len({prompt.text for prompt in prompts(8)}) == 8


def token(token_id: int, *top: float) -> TokenLogprob:
    """Of a row whose likeliest tokens have these probabilities, with ids from 0."""
    entries = tuple(Alternative(i, "", float(np.log(p))) for i, p in enumerate(top))
    own = entries[token_id].logprob if token_id < len(top) else -9.0
    return TokenLogprob(token_id, "", own, entries)


def test_levels_are_where_a_token_stands() -> None:
    found = level([token(0, 0.5, 0.3), token(1, 0.5, 0.3), token(7, 0.5, 0.3)], 0)
    assert 0 <= found[0] < 0.5 <= found[1] < 0.8 <= found[2] < 1
    assert (level([token(0, 1.0)] * 9, 1) < 1).all()


def _any(**values: Any) -> Case:
    ways: dict[str, Any] = {
        "accept": "coupled", "exactness": "exact", "source": "all", "temperature": 1.0,
        "mode": "full", "is_beside": False, "speculate": 6, "is_deferred": False,
    }  # fmt: skip
    return Case(**{**ways, **values})


def test_what_is_promised() -> None:
    assert _any().promises_text
    assert not _any(exactness="tree").promises_text
    assert not _any(accept="rejection").promises_text
    assert _any(accept="rejection", temperature=0.0).promises_text
