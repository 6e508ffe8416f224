"""What the commands print, and where."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from commandline import COMMAND, CommandLine
from tiny_checkpoints import TINY

import headrace
from headrace.cli import COMMANDS, cli
from headrace.commands.flags import field_docs, json_value, unescape
from headrace.export.build import ExportOptions, export
from headrace.models.manifest import TARGET
from headrace.runtime.config import RuntimeConfig
from headrace.runtime.request import SamplingParams

PROMPT = "the pump"
LONG = ("--max-tokens", "30", "--ignore-eos")


def answer(command: CommandLine, *arguments: str | Path, stdin: bytes = b"") -> dict[str, Any]:
    """The JSON of a run; asserts that there is exactly one object."""
    result = command("run", *arguments, "--json", stdin=stdin)
    assert result.code == 0, result.err
    assert result.out.count("\n") == 1
    value: dict[str, Any] = json.loads(result.out)
    return value


def test_help_and_version_start_fast() -> None:
    """Without the libraries that take long to import."""
    code = (
        "import sys; from headrace.cli import main\n"
        "assert main(['--help']) == main(['--version']) == 0\n"
        "assert not {'numpy', 'onnxruntime', 'rich', 'tokenizers'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"headrace {headrace.__version__}\n")


def test_the_list_of_commands_says_what_their_help_says() -> None:
    context = click.Context(cli)
    for name, words in COMMANDS.items():
        found = cli.get_command(context, name)
        assert found is not None
        assert found.get_short_help_str(200).rstrip(".") == words.rstrip(".")


def test_every_parameter_has_a_flag_with_help() -> None:
    found = cli.get_command(click.Context(cli), "run")
    assert found is not None
    helps = {p.name: str(getattr(p, "help", "")) for p in found.params}
    # What a request may say differently from the loaded model is the model's flag here.
    docs = {**field_docs(SamplingParams), **field_docs(RuntimeConfig)}
    for name, doc in docs.items():
        if name != "cache":
            assert helps[name].startswith(doc), name


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"headrace {headrace.__version__}\n")


def test_json_is_one_object(command: CommandLine, tiny_bundle: Path) -> None:
    value = answer(command, tiny_bundle, PROMPT, *LONG, "--logprobs", "2", "--seed", "7")
    assert value["model"] == "llama"
    assert value["seed"] == 7
    assert value["finish_reason"] == "length"
    assert len(value["token_ids"]) == value["usage"]["completion_tokens"] == 30
    assert [len(entry["top"]) for entry in value["logprobs"]] == [2] * 30
    assert value["timings"]["decode_tokens"] == 29


def test_streamed_text_is_the_jsons(command: CommandLine, tiny_bundle: Path) -> None:
    whole = answer(command, tiny_bundle, PROMPT, *LONG)["text"]
    streamed = command("run", tiny_bundle, PROMPT, *LONG)
    assert streamed.out == whole + "\n"
    assert streamed.err == ""


def test_stop_strings_cut(command: CommandLine, tiny_bundle: Path) -> None:
    whole = answer(command, tiny_bundle, PROMPT, *LONG)["text"]
    stop = whole[4:6]
    value = answer(command, tiny_bundle, PROMPT, *LONG, "--stop", "never said", "--stop", stop)
    assert value["text"] == whole[: whole.index(stop)]
    assert (value["finish_reason"], value["stop_reason"]) == ("stop", stop)


def test_the_prompt_comes_from_a_pipe(command: CommandLine, tiny_bundle: Path) -> None:
    given = answer(command, tiny_bundle, PROMPT, *LONG)
    for arguments in ((tiny_bundle,), (tiny_bundle, "-")):
        piped = answer(command, *arguments, *LONG, stdin=f"{PROMPT}\n".encode())
        assert piped["token_ids"] == given["token_ids"]
    assert answer(command, tiny_bundle, PROMPT, *LONG, stdin=b"unread")["text"] == given["text"]


def test_a_temperature_reports_a_seed_that_repeats_the_text(
    command: CommandLine, tiny_bundle: Path
) -> None:
    warm = ("run", tiny_bundle, PROMPT, *LONG, "--temperature", "1.5")
    first = command(*warm)
    seed = first.err.removeprefix("seed ").strip()
    assert seed.isdigit()
    assert command(*warm, "--seed", seed).out == first.out


def test_raw_is_without_template(command: CommandLine, tiny_bundle: Path) -> None:
    chat = answer(command, tiny_bundle, PROMPT, "--max-tokens", "1")
    raw = answer(command, tiny_bundle, PROMPT, "--max-tokens", "1", "--raw")
    assert raw["usage"]["prompt_tokens"] < chat["usage"]["prompt_tokens"]


def test_templates_and_their_arguments(
    command: CommandLine, tiny_bundle: Path, tmp_path: Path
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% if thinking %}{{ messages[0].content * 4 }}{% else %}x{% endif %}")
    base = (tiny_bundle, "pq", "--max-tokens", "1", "--chat-template", template)
    counts = [
        answer(command, *base, "--template-arg", f"thinking={value}")["usage"]["prompt_tokens"]
        for value in ("true", "false", "maybe")
    ]
    assert counts[0] == counts[2] > counts[1]


def test_values_on_the_command_line() -> None:
    assert [json_value(text) for text in ("false", "3", '"3"', "a b")] == [False, 3, "3", "a b"]
    assert unescape(r"a\n\t\\n\x") == "a\n\t\\n\\x"


def test_the_models_own_sampling(command: CommandLine, tmp_path: Path) -> None:
    """generation_config counts where it is asked for, and flags go before it."""
    source = tmp_path / "source"
    source.mkdir()
    for path in (TINY / "llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    (source / "generation_config.json").write_text(
        '{"eos_token_id": 1, "do_sample": true, "temperature": 2.0, "top_k": 50}'
    )
    bundle = tmp_path / "bundle"
    export(str(source), bundle, ExportOptions(quant="f32"))
    base = ("run", bundle, PROMPT, *LONG, "--seed", "3")
    greedy = command(*base).out
    assert command(*base, "--sampling", "model").out != greedy
    assert command(*base, "--sampling", "model", "--temperature", "0").out == greedy
    explicit = ("--temperature", "2", "--top-k", "50")
    assert command(*base, "--sampling", "model").out == command(*base, *explicit).out


def test_logit_bias_forces_a_token(command: CommandLine, tiny_bundle: Path) -> None:
    bias = ("--logit-bias", "70=100", "--logit-bias", "71=-100")
    value = answer(command, tiny_bundle, PROMPT, "--max-tokens", "5", *bias)
    assert value["token_ids"] == [70] * 5


def test_figures_go_beside_the_answer(command: CommandLine, tiny_bundle: Path) -> None:
    plain = command("run", tiny_bundle, PROMPT, *LONG)
    stats = command("run", tiny_bundle, PROMPT, *LONG, "--stats")
    assert stats.out == plain.out
    for figure in ("time to first token", "host time per step", "memory, peak", "seed"):
        assert figure in stats.err
    logprobs = command("run", tiny_bundle, PROMPT, *LONG, "--logprobs", "1")
    assert logprobs.out.startswith(plain.out)
    assert len(logprobs.out.splitlines()) >= len(plain.out.splitlines()) + 30


def test_inspect_a_bundle(command: CommandLine, tiny_bundle: Path) -> None:
    table = command("inspect", tiny_bundle)
    assert table.code == 0, table.err
    for words in ("llama", "mean KL", "past_key_values.0-1.key", "attention_bias", "sha256"):
        assert words in table.out, words
    value = json.loads(command("inspect", tiny_bundle, "--json").out)
    assert value["kv_bytes_per_token"] == {"pool": 2 * 2 * 5 * 8 * 2, "arena": 2 * 2 * 5 * 8 * 4}
    assert {file["state"] for file in value["files"]} == {"ok"}
    assert value["tokenizer"]["eos_ids"] == [1, 2]


def test_inspect_a_graph(command: CommandLine, tiny_bundle: Path) -> None:
    """The session sees what iospec says."""
    bundle = json.loads(command("inspect", tiny_bundle, "--json").out)
    graph = json.loads(command("inspect", tiny_bundle / TARGET, "--json").out)
    assert graph["inputs"] == bundle["inputs"]
    assert graph["outputs"] == bundle["outputs"]
    assert graph["kv_bytes_per_token"] == bundle["kv_bytes_per_token"]["arena"]
    assert "past_key_values.0-1.key" in command("inspect", tiny_bundle / TARGET).out


def test_score(command: CommandLine, tiny_bundle: Path, tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("pump 3 runs")
    value = json.loads(command("score", tiny_bundle, text, "--json").out)
    piped = json.loads(command("score", tiny_bundle, "--json", stdin=b"pump 3 runs").out)
    assert piped == value
    total = sum(token["logprob"] for token in value["tokens"])
    assert value["total_logprob"] == pytest.approx(total)
    short = command("score", tiny_bundle, text).out
    assert f"{value['perplexity']:.4f}" in short
    assert len(command("score", tiny_bundle, text, "--tokens").out) > len(short)


def test_prepare_says_where(
    command: CommandLine,
    tiny_bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path))
    first = command("prepare", tiny_bundle)
    assert first.code == 0, first.err
    assert "preparing" in first.err
    folder = Path(first.out.rsplit(maxsplit=2)[0])
    assert folder.is_relative_to(tmp_path) and list(folder.iterdir())
    again = command("prepare", tiny_bundle)
    assert again.out == first.out
    assert "prepared already" in again.err


def test_export_sums_up(command: CommandLine, tmp_path: Path) -> None:
    out = tmp_path / "new" / "bundle"
    done = command("export", TINY / "qwen2", "-o", out, "--quant", "f32", "--kv", "f32")
    assert done.code == 0, done.err
    for words in ("qwen2", "mean KL", "perplexity", "size on disk", "time"):
        assert words in done.out, words
    assert done.err.splitlines()[0].startswith("reading ")
    assert [path.name for path in out.parent.iterdir()] == ["bundle"]
