"""Bundles of a real model's geometry with random weights: speed without a download.

    python benchmarks/synthetic.py write OUT [--geometry 1.5b] [--quant int4] [--seed 0] [--json]
    python benchmarks/synthetic.py measure BUNDLE [--p 0.5 0.7 0.9] [--tokens 96] [--rounds 3] [--json]

What a pass costs depends on shapes and not on values, so such a bundle times a pass as the trained
model would; its text means nothing. The weights go into a temporary Hugging Face folder beside OUT
(2 bytes a weight), which a plain `headrace export` reads, with its parity check. `measure` verifies
a scripted draft that costs nothing and whose tokens are each accepted with probability p, against
the fastest plain decoding (unpadded single rows), beside the best that the measured costs of passes
allow. The last line of --json is one object.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import safetensors.numpy
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace import LLM, SamplingParams
from headrace.export.build import ExportOptions, export
from headrace.models.config import ModelConfig
from headrace.models.families import config_from_hf, weights
from headrace.runtime import pace
from headrace.runtime.pace import Origin, PassCosts
from headrace.runtime.propose import Proposal, best_chain
from headrace.runtime.request import MAX_PROPOSED, Completion
from headrace.runtime.sampling import Sampler
from headrace.runtime.sequence import Sequence as Tokens
from headrace.runtime.speculate import Speculator, Text

_QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
    "vocab_size": 151936,
}

GEOMETRIES: dict[str, dict[str, Any]] = {
    # Qwen2.5-1.5B-Instruct
    "1.5b": {
        **_QWEN,
        "num_hidden_layers": 28,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    # Qwen2.5-0.5B-Instruct
    "0.5b": {
        **_QWEN,
        "num_hidden_layers": 24,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    # SmolLM2-135M-Instruct
    "135m": {
        **_QWEN,
        "architectures": ["LlamaForCausalLM"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "max_position_embeddings": 8192,
        "vocab_size": 49152,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
    },
    # for tests
    "tiny": {
        **_QWEN,
        "max_position_embeddings": 512,
        "vocab_size": 640,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}

END = "<|endoftext|>"

EMBEDDING_STD = 0.02
"""With a tied head, logits of a standard deviation of 0.02 * sqrt(hidden_size): below 1, so no token
stands out, and the parity check passes (int4 at the 1.5B: a mean KL of 0.06, allowed are 0.10)."""


def byte_level_tokenizer(vocab_size: int) -> str:
    """The tokenizer.json of a vocabulary of all bytes, then pairs and triples of them, and END.

    Without merges a text becomes its bytes. What the model puts out is one, two or three bytes a
    token: decoding has a vocabulary of the real size to go through.
    """
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = chain.from_iterable(product(letters, repeat=n) for n in (1, 2, 3))
    vocab = {"".join(text): i for i, text in enumerate(islice(texts, vocab_size - 1))}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    text: str = tokenizer.to_str()
    return text


def standard_deviation(name: str, shape: tuple[int, ...], num_layers: int) -> float:
    """Such that activations keep their size through the layers (Glorot and Bengio, 2010)."""
    if name.endswith("embed_tokens.weight"):
        return EMBEDDING_STD
    if name.endswith(".bias"):
        return EMBEDDING_STD
    std = float(shape[1] ** -0.5)
    # 2 * num_layers updates are added up; each is smaller for it (GPT-2, Radford et al., 2019).
    adds = name.endswith(("o_proj.weight", "down_proj.weight"))
    return std / (2 * num_layers) ** 0.5 if adds else std


def random_weight(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], num_layers: int
) -> np.ndarray[Any, Any]:
    """In bfloat16."""
    if name.endswith("norm.weight"):
        return np.ones(shape, ml_dtypes.bfloat16)
    values = rng.standard_normal(shape, np.float32)
    values *= np.float32(standard_deviation(name, shape, num_layers))
    return values.astype(ml_dtypes.bfloat16)


def write_checkpoint(folder: Path, geometry: dict[str, Any], seed: int) -> ModelConfig:
    """A Hugging Face folder, one shard a layer, so that one layer at a time is in memory."""
    config = config_from_hf(geometry)
    (folder / "config.json").write_text(json.dumps(geometry))
    (folder / "tokenizer.json").write_text(byte_level_tokenizer(config.vocab_size))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    shards: dict[str, dict[str, tuple[int, ...]]] = {}
    for name, shape in weights(config).items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        shards.setdefault(f"model-{layer}.safetensors", {})[name] = shape
    rng = np.random.default_rng(seed)
    for file, shapes in shards.items():
        made = {n: random_weight(rng, n, shape, config.num_layers) for n, shape in shapes.items()}
        safetensors.numpy.save_file(made, folder / file)
    index = {"weight_map": {name: file for file, shapes in shards.items() for name in shapes}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return config


class Progress:
    """Stages on stderr (a headrace.export.report.Reporter)."""

    def stage(self, title: str, steps: int | None = None) -> None:
        print(title, file=sys.stderr)

    def advance(self) -> None:
        pass


def size_of(files: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in files if path.is_file())


def write(args: argparse.Namespace) -> dict[str, Any]:
    if args.out.exists():
        sys.exit(f"{args.out}: exists already; choose another name or remove it")
    started = time.monotonic()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # Not in the temporary folder of the system: that may be memory, and this is up to 3 GB.
    with tempfile.TemporaryDirectory(prefix=f".{args.out.name}-", dir=args.out.parent) as folder:
        Progress().stage(f"writing random weights, {args.geometry}")
        write_checkpoint(Path(folder), GEOMETRIES[args.geometry], args.seed)
        options = ExportOptions(quant=args.quant, name=f"synthetic-{args.geometry}")
        manifest = export(folder, args.out, options, Progress())
    parity = manifest.target.parity
    assert parity is not None
    return {
        "bundle": manifest.name,
        "quant": manifest.quant,
        "seed": args.seed,
        "mb": size_of(args.out.rglob("*")) / 1e6,
        "parity_mean_kl": parity.mean_kl,
        "parity_limit": parity.limit,
        "seconds": time.monotonic() - started,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    }


class Scripted(Speculator):
    """A draft that costs nothing and knows the text: each token is right with probability p."""

    truth: Sequence[int] = ()
    p = 1.0
    chance = random.Random(0)
    done = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        super().extend(token_ids)
        self.done += len(token_ids)

    def propose(self, most: int) -> Proposal:
        room = self._room(min(most, MAX_PROPOSED))
        chain = [
            token_id if self.chance.random() < self.p else token_id ^ 1
            for token_id in self.truth[self.done : self.done + max(0, room.most)]
        ]
        # An origin for each p: what one is like says nothing of another.
        offer = Proposal.chain(chain, [Origin(f"script {self.p}")] * len(chain))
        return best_chain([offer], self._pace, room)[0]


@contextmanager
def scripted(llm: LLM, truth: Sequence[int], p: float, seed: int) -> Iterator[None]:
    """Requests propose what `Scripted` does."""

    def speculator(sequence: Tokens, sampler: Sampler, num_new: int) -> Speculator:
        text = Text(sequence.tokens(), sequence.length, num_new, sequence.exactness)
        shared = llm.engine.speculation
        assert shared is not None
        made = Scripted(shared, text, sampler, llm.engine.facts, lambda: 1)
        made.truth, made.p, made.chance = truth, p, random.Random(seed)
        return made

    llm.engine.speculator = speculator  # type: ignore[method-assign]
    try:
        yield
    finally:
        del llm.engine.speculator


def best_speedup(p: float, costs: PassCosts) -> tuple[float, int]:
    """What c(T) allows over single rows, (1 - p^(n+1)) / (1 - p) * c(1) / c(n + 1), and its n."""
    yields = {
        n: sum(p**i for i in range(n + 1)) * costs.of(1) / costs.of(n + 1)
        for n in range(MAX_PROPOSED + 1)
    }
    best = max(yields, key=yields.__getitem__)
    return yields[best], best


def measure_scripted(args: argparse.Namespace) -> dict[str, Any]:
    """Plain single rows, padded ones, and a scripted draft at each p, in turn, round by round."""
    base = {"max_tokens": args.tokens, "ignore_eos": True}
    bare = SamplingParams(**base, speculate="off", exactness="tree")
    padded = SamplingParams(**base, speculate="off")
    settings: dict[str, Any] = {"ctx": args.context + args.tokens + 16, "lanes": 1}
    rows: list[dict[str, Any]] = []
    with LLM(args.bundle, **settings, target_threads=args.threads) as llm:
        vocab = llm.bundle.manifest.config.vocab_size
        chance = random.Random(args.seed)
        prompt = [chance.randrange(vocab) for _ in range(args.context)]
        costs = pace.measure(llm.backend)
        llm.generate(prompt, bare)
        truth = llm.generate(prompt, padded).token_ids
        seconds: dict[object, list[float]] = {}
        counts: dict[float, list[float]] = {p: [] for p in args.p}
        for turn in range(args.rounds):
            for name, params in (("bare", bare), ("padded", padded)):
                seconds.setdefault(name, []).append(_decode_s(llm.generate(prompt, params)))
            for p in args.p:
                with scripted(llm, truth, p, args.seed + turn):
                    answer = llm.generate(prompt, SamplingParams(**base))
                assert answer.token_ids == truth, "speculation changed the text"
                assert answer.speculation is not None
                seconds.setdefault(p, []).append(_decode_s(answer))
                counts[p].append(args.tokens / answer.speculation.passes)
        for p in args.p:
            most, at = best_speedup(p, costs)
            rows.append(
                {
                    "p": p,
                    "speedup": _ratio(seconds["bare"], seconds[p]),
                    "speedup_over_padded": _ratio(seconds["padded"], seconds[p]),
                    "tokens_per_pass": statistics.median(counts[p]),
                    "best_by_costs": most,
                    "best_proposed": at,
                }
            )
    return {
        "relative_costs": {n: s / costs.of(1) for n, s in costs.seconds.items()},
        "plain_tokens_per_s": (args.tokens - 1) / statistics.median(seconds["bare"]),
        "padded_over_plain": _ratio(seconds["bare"], seconds["padded"]),
        "p": rows,
    }


def _decode_s(answer: Completion) -> float:
    return answer.timings.decode_s


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    """Median of the rounds' own ratios: what slows the machine down slows both."""
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    writing = commands.add_parser("write", help="write a bundle of random weights")
    writing.add_argument("out", type=Path, metavar="OUT")
    which = writing.add_mutually_exclusive_group()
    which.add_argument("--geometry", choices=GEOMETRIES, default="1.5b")
    which.add_argument("--tiny", action="store_const", dest="geometry", const="tiny")
    writing.add_argument("--quant", choices=["int4", "int8"], default="int4")
    writing.add_argument("--seed", type=int, default=0)
    writing.add_argument("--json", action="store_true")
    writing.set_defaults(run=write)
    measuring = commands.add_parser("measure", help="a scripted draft over its acceptance")
    measuring.add_argument("bundle", type=Path, metavar="BUNDLE")
    measuring.add_argument("--p", type=float, nargs="+", default=[0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    measuring.add_argument("--tokens", type=int, default=96)
    measuring.add_argument("--context", type=int, default=256)
    measuring.add_argument("--rounds", type=int, default=3)
    measuring.add_argument("--threads", type=int)
    measuring.add_argument("--seed", type=int, default=0)
    measuring.add_argument("--json", action="store_true")
    measuring.set_defaults(run=measure_scripted)
    args = parser.parse_args()
    result = args.run(args)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:16} {value}")


if __name__ == "__main__":
    main()
