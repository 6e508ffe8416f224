"""Runs on the emulated board: answers to one prompt, fed in pieces of different sizes.

    python answers_there.py BUNDLE SIZE...

Prints one JSON object: answers by the size of the pieces, 0 for the prompt as a whole; each is the
token ids with their log-probabilities.
"""

from __future__ import annotations

import json
import sys

from headrace import LLM, SamplingParams
from headrace.runtime.request import Completion
from headrace.runtime.session import Session

PROMPT = "pump 3 pressure 4.2 bar, pump 4 pressure 4.2 bar, pump 5"
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=20, logprobs=3, ignore_eos=True)


def answer(session: Session, ids: list[int], size: int) -> Completion:
    while size and len(ids) > size:
        session.feed(ids[:size])
        ids = ids[size:]
    return session.generate(ids, PARAMS)


def main(path: str, sizes: list[int]) -> None:
    found = {}
    with LLM(path, prefix_cache="off") as llm:
        ids = llm.encode(PROMPT)
        for size in sizes:
            with llm.session() as session:
                done = answer(session, ids, size)
            found[size] = [(token.token_id, token.logprob) for token in done.logprobs or ()]
    print(json.dumps({"prompt_len": len(ids), "answers": found}))


if __name__ == "__main__":
    main(sys.argv[1], list(map(int, sys.argv[2:])))
