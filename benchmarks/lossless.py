"""Whether speculation changes any text, over many prompts; and whether it changes a distribution.

    python benchmarks/lossless.py BUNDLE -o FILE [--logs FILE...] [--num-prompts 100]

1. Each prompt is decoded plain and alone, and then sped up: lookup, the bundle's draft and both,
   alone and beside three other sessions, and again with deferral. Token ids, log-probabilities and
   alternatives must be the same bits. Prompts take turns with temperature 0 and 0.8, full session
   and a ring that wraps at least three times.
2. `--samples` outputs of the six-token language of tests/six_tokens.py by the rule `rejection`, over
   all its sampling options with drafted chains and trees, against their distribution; as many by
   `coupled` against plain ones. This comes first.

What was found is added to FILE, one JSON object a line, as it is found, and not made again. The last
line printed is a JSON object. Exits with 1 if anything differs or does not fit.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from headrace import LLM
from headrace.runtime.fit import fit
from headrace.runtime.lossless import LEAST_FIT, Case, Job, Prompt, difference, prompts, run
from headrace.runtime.request import Completion
from headrace.runtime.verify import coupled, rejection

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

import six_tokens as six

GROUP = 4
"""Prompts at a time: as many as are decoded beside one another."""

LINES = 3
"""Of a log, to a prompt."""

SAMPLED_AT_ONCE = 2_500


class Store:
    """What was found, by name; a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path = path
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        if lines and not lines[-1].endswith("\n"):
            # Stopped while it was written.
            lines.pop()
            path.write_text("".join(lines))
        entries = list(map(json.loads, lines))
        self.found: dict[str, dict[str, Any]] = {entry["name"]: entry for entry in entries}

    def add(self, name: str, **values: Any) -> None:
        entry = {"name": name, **values}
        self.found[name] = entry
        with self._path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        print(json.dumps(entry), file=sys.stderr, flush=True)

    def starting(self, beginning: str) -> list[dict[str, Any]]:
        return [e for name, e in self.found.items() if name.startswith(beginning)]


# texts


def texts(logs: list[Path], count: int) -> list[Prompt]:
    """From the logs and the built-in prompts in turn, three to one."""
    parts = [_parts(path) for path in logs]
    ours = iter(prompts(count))
    found: list[Prompt] = []
    for i in range(count):
        is_log = parts and i % 4 < 3
        found.append(next(parts[i % len(parts)]) if is_log else next(ours))
    return found


def _parts(path: Path) -> Iterator[Prompt]:
    lines = path.read_text(errors="replace").splitlines(keepends=True)
    for i in itertools.count():
        start = 37 * i % max(1, len(lines) - LINES)
        yield Prompt(f"{path.name} {start}", "".join(lines[start : start + LINES])[:1200])


def case(number: int, source: Any, speculate: Any, is_deferred: bool) -> Case:
    """Every fourth prompt is decoded in the same way."""
    return Case(
        accept="coupled",
        exactness="exact",
        source=source,
        temperature=(0.0, 0.8)[number % 2],
        mode="full" if number % 4 < 2 else "stream",
        is_beside=False,
        speculate=speculate,
        is_deferred=is_deferred,
    )


def compare(args: argparse.Namespace, store: Store) -> None:
    chosen = texts(args.logs, args.num_prompts)
    with (
        LLM(args.bundle, ctx=1024, defer="off") as inline,
        LLM(args.bundle, ctx=1024, defer="on") as deferred,
    ):
        has_draft = inline.bundle.draft is not None
        ways = [("lookup", False)]
        if has_draft:
            ways += [("draft", False), ("all", False), ("draft", True), ("all", True)]
        for first in range(0, len(chosen), GROUP):
            group = range(first, min(first + GROUP, len(chosen)))
            plain: list[Completion] = []
            for (source, is_deferred), is_beside in itertools.product(ways, (False, True)):
                name = f"text {first} {source} {is_deferred} {is_beside}"
                if name in store.found:
                    continue

                def jobs(speculate: Any, source: str = source, d: bool = is_deferred) -> list[Job]:
                    return [
                        Job(case(i, source, speculate, d), chosen[i], i, args.tokens)
                        for i in group  # noqa: B023
                    ]

                plain = plain or run(inline, jobs("off"), is_beside=False)
                llm = deferred if is_deferred else inline
                # Up to four whatever they cost when alone, and else as many as pay.
                sped = run(llm, jobs("auto" if is_beside else 4), is_beside=is_beside)
                parted = [d for d in map(difference, [chosen[i] for i in group], plain, sped) if d]
                store.add(
                    name,
                    prompts=len(group),
                    tokens=sum(len(a.token_ids) for a in sped),
                    accepted=sum(a.speculation.accepted for a in sped if a.speculation),
                    different=len(parted),
                    first_difference=str(parted[0]) if parted else None,
                )


# six tokens


def sample(store: Store, total: int) -> None:
    count = -(-total // len(six.SAMPLINGS))
    for sampling in six.SAMPLINGS:
        for width in (1, 2):
            for start in range(0, -(-count // 2), SAMPLED_AT_ONCE):
                name = f"rejection {sampling} {width} {start}"
                if name not in store.found:
                    store.add(name, counts=_sampled(sampling, width, start).tolist())
        for start in range(0, count, SAMPLED_AT_ONCE):
            name = f"coupled {sampling} {start}"
            if name not in store.found:
                store.add(name, different=_different(sampling, start))


def _language() -> six.Language:
    return six.Language.random(4, num_draft=5)


def _sampled(sampling: str, width: int, start: int) -> np.ndarray:
    """[36] how often each two first tokens came."""
    language, counts = _language(), np.zeros(six.SIZE**2, np.int64)
    for seed in range(start, start + SAMPLED_AT_ONCE):
        sampler = six.sampler_of(sampling, seed)
        draft = six.Drafter(language, sampler, "rejection", width, 2)
        a, b = six.decode(language, sampler, rejection, draft, 3)[:2]
        counts[a * six.SIZE + b] += 1
    return counts


def _different(sampling: str, start: int) -> int:
    language, different = _language(), 0
    for seed in range(start, start + SAMPLED_AT_ONCE):
        sampler = six.sampler_of(sampling, seed)
        draft = six.Drafter(language, sampler, "coupled", 1 + seed % 2)
        plain = six.decode(language, sampler, coupled, six.nothing, 4)
        different += six.decode(language, sampler, coupled, draft, 4) != plain
    return different


def summary(store: Store) -> dict[str, Any]:
    texts = store.starting("text ")
    fits: dict[str, float] = {}
    samples = 0
    for sampling in six.SAMPLINGS:
        joint = six.plain_joint(_language(), six.sampler_of(sampling), 2).ravel()
        for width in (1, 2):
            parts = store.starting(f"rejection {sampling} {width} ")
            if parts:
                counts = np.sum([part["counts"] for part in parts], axis=0)
                kind = "chains" if width == 1 else "trees"
                fits[f"{sampling}, {kind}"] = fit(counts, joint * counts.sum())
                samples += int(counts.sum())
    same = store.starting("coupled ")
    return {
        "prompts": len({e["name"].split()[1] for e in texts}) * GROUP,
        "answers": sum(e["prompts"] for e in texts),
        "tokens": sum(e["tokens"] for e in texts),
        "accepted": sum(e["accepted"] for e in texts),
        "different": sum(e["different"] for e in texts),
        "first_difference": next((e["first_difference"] for e in texts if e["different"]), None),
        "rejection_samples": samples,
        "rejection_fits": fits,
        "coupled_samples": len(same) * SAMPLED_AT_ONCE,
        "coupled_different": sum(e["different"] for e in same),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True, help="what was found")
    parser.add_argument("--logs", type=Path, nargs="*", default=[])
    parser.add_argument("--num-prompts", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--samples", type=int, default=200_000)
    args = parser.parse_args()
    store = Store(args.output)
    sample(store, args.samples)
    compare(args, store)
    found = summary(store)
    for name, value in found.items():
        print(f"{name:20} {value}")
    print(json.dumps(found))
    fits = min(found["rejection_fits"].values(), default=1.0) > LEAST_FIT
    sys.exit(0 if fits and not found["different"] and not found["coupled_different"] else 1)


if __name__ == "__main__":
    main()
