"""benchmarks/synthetic.py writes bundles that the runtime takes, and cleans up after itself."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from headrace import LLM, SamplingParams
from headrace.models.families import config_from_hf, weights
from headrace.models.manifest import Bundle

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def synthetic(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("synthetic")


@pytest.mark.parametrize("quant", ["int4", "int8"])
def test_a_tiny_bundle_runs(
    synthetic: Any,
    quant: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "bundle"
    arguments = ["write", str(out), "--tiny", "--quant", quant, "--json"]
    monkeypatch.setattr("sys.argv", ["synthetic.py", *arguments])
    synthetic.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["parity_mean_kl"] < result["parity_limit"] / 2
    assert list(tmp_path.iterdir()) == [out], "the checkpoint is gone"
    assert Bundle.open(out).manifest.quant == quant
    with LLM(out) as llm:
        answer = llm.generate("pump 3", SamplingParams(max_tokens=8, ignore_eos=True))
        assert len(answer.token_ids) == 8


@pytest.mark.parametrize(
    ("geometry", "num_weights"),
    [("1.5b", 1_543_714_304), ("0.5b", 494_032_768), ("135m", 134_515_008)],
)
def test_geometries_have_as_many_weights_as_the_models(
    synthetic: Any, geometry: str, num_weights: int
) -> None:
    """Qwen2.5-1.5B and 0.5B, and SmolLM2-135M, as their model cards count them."""
    table = weights(config_from_hf(synthetic.GEOMETRIES[geometry]))
    total = sum(shape[0] * (shape[1] if len(shape) > 1 else 1) for shape in table.values())
    assert total == num_weights


def test_a_seed_repeats_the_weights(synthetic: Any, tmp_path: Path) -> None:
    written = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        folder = tmp_path / name
        folder.mkdir()
        synthetic.write_checkpoint(folder, synthetic.GEOMETRIES["tiny"], seed)
        written.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert written[0] == written[1] != written[2]


def test_the_tokenizer_has_every_byte_and_fills_the_vocabulary(synthetic: Any) -> None:
    tokenizer = tokenizers.Tokenizer.from_str(synthetic.byte_level_tokenizer(70_000))
    assert tokenizer.get_vocab_size() == 70_000
    assert tokenizer.token_to_id(synthetic.END) == 69_999
    text = "pump 3: 71.5 °C\n温度"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
