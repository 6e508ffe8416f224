"""Writes tests/data/hard_strings.json and the token ids that llama.cpp gives for them.

Run with an interpreter that has llama-cpp-python and numpy, neither of them needed by the tests:

    python tests/make_hard_strings.py SMOLLM2.gguf FOLDER_OF_VOCABULARIES

The folder holds the ggml-vocab-*.gguf files that tests/vocab_files.py fetches. The strings are
seeded: a second run writes the same files.
"""

# ruff: noqa: RUF001 - letters that look like others are the point

import json
import random
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

DATA = Path(__file__).parent / "data"
NUM_STRINGS = 200
VOCABULARIES = (
    *("aquila", "baichuan", "command-r", "deepseek-coder", "falcon", "gpt-2", "gpt-neox"),
    *("llama-bpe", "llama-spm", "mpt", "phi-3", "qwen2", "refact", "starcoder"),
)

WRITTEN = [
    # numbers
    *("0", "7", "12", "123", "1234", "12345", "1234567890123456789", "3.14159", "-273.15 °C"),
    *("1,234,567.89", "1 234 567,89", "1_000_000", "0x1F 0XDEADBEEF 0b1011", "6.02e23 1E-9"),
    *("½ ¾ ² ³ ₄ Ⅷ ①②③", "٠١٢٣٤٥٦٧٨٩", "१२३४५", "１２３４５", "v1.2.3-rc.4+build.56", "50% €9.99"),
    # whitespace and control characters
    *(" ", "  ", "   ", "\n", "\n\n", "\n\n\n\n\n", "\t", "\t\t\t", "\r\n", "\r\r\n\n", " \n ", "a \n"),
    *("  leading", "trailing  ", "a  b   c    d     e", "\ta\t\tb", "a\n\nb\n \nc", "x \t \n\t y"),
    *("a\u00a0b\u00a0\u00a0c", "a\u2003b\u3000c", "zero\u200bwidth\u200cjoin\u200der\ufeffmark"),
    *("bell\x07 esc\x1b[31mred\x1b[0m", "\x00\x01\x02", "nul\x00in", "\x7f\x80\x9f", "a\x0bb\x0cc"),
    *("line\u2028sep\u2029par", "next\x85line", "unit\x1fsep\x1crec", "soft\u00adhyphen"),
    # apostrophes and words
    *("I'm you're he's we'll they'd I've can't", "I'M YOU'RE HE'S WE'LL THEY'D I'VE CAN'T"),
    *("rock 'n' roll", "'s 't 're", "O'Neil's dogs' 'quoted'", "l'été d'où qu’il n’a", "don’t"),
    *("Hello, world!", "The quick brown fox jumps over the lazy dog.", "HTTPServer getURLPath"),
    *("snake_case kebab-case CamelCase SCREAMING_CASE", "a", "A", "ß ẞ ﬁ ǅ ı İ", "naïve façade"),
    *("Donaudampfschifffahrtsgesellschaftskapitän", "pneumonoultramicroscopicsilicovolcanoconiosis"),
    *("a" * 300, "ab" * 100, "aaa " * 20, "=" * 80, "-" * 33, "." * 17, "!?" * 9, "#" * 5, "hahahaha"),
    # scripts
    *("你好，世界！今天天气怎么样？", "日本語のテキストとカタカナ、ひらがな。", "한국어 문장입니다. 테스트 123"),
    *("مرحبا بالعالم، كيف حالك؟", "עברית עם ניקוד: שָׁלוֹם", "नमस्ते दुनिया, आप कैसे हैं?", "สวัสดีชาวโลก ทดสอบ"),
    *("Привет, мир! Ёжик № 5", "Γειά σου Κόσμε", "გამარჯობა", "Բարեւ", "Tiếng Việt có dấu", "தமிழ் உரை"),
    *("ሰላም ልዑል", "བོད་སྐད།", "ជំរាបសួរ", "မင်္ဂလာပါ", "𠀀𠀁𪚥 rare Han", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𝟙𝟚𝟛", "ᚠᚢᚦ runes"),
    *("繁體中文與简体中文mixed英文words", "漢字かな交じり文ABC123", "ＡＢＣ　ｆｕｌｌｗｉｄｔｈ"),
    # combining marks and emoji
    *("e\u0301 é n\u0303 ñ", "Z\u0351\u036b\u0343\u036aa\u0302\u034ag\u0348o", "a\u0300\u0301\u0302b"),
    *("😀", "😀😃😄😁", "👨‍👩‍👧‍👦 family", "🏳️‍🌈🏴‍☠️", "👍🏽👩🏿‍🚀", "🇩🇪🇫🇷🇯🇵", "1️⃣2️⃣ #️⃣", "❤️ ♥ ☃ ⚠️", "🤷‍♂️text"),
    *("text😀text 😀 text", "🚀 (normal) 😶‍🌫️ (multiple emojis)", "\U000e0001tag\U000e007f", "\ue000\uf8ff"),
    # code
    "def f(x: int = 0) -> str:\n    return f\"{x!r:>10}\"  # comment\n",
    "for (int i = 0; i < n; ++i) {\n\t\tsum += a[i] * b[i];\n}\n",
    "SELECT * FROM t WHERE a >= 10 AND b != 'x''y';",
    '{"key": [1, 2.5, -3e4, null, true], "nested": {"a": "\\u00e9\\n"}}',
    "<div class='a b'>&nbsp;&lt;tag/&gt;</div><!-- c -->",
    "$ ls -la | grep '^d' && echo \"$HOME\" > /dev/null 2>&1",
    "regex: ^[\\w.+-]+@(?:[a-z0-9-]+\\.)+[a-z]{2,}$",
    "if (a && !b || c ^ d) { x <<= 2; y ??= z?.w ?? []; } // ->",
    "\\begin{equation} \\frac{a}{b} = \\sqrt{x^2 + y_1} \\end{equation}",
    "diff --git a/x b/x\n@@ -1,3 +1,4 @@\n-old\n+new\n context\n",
    "int main(void)\r\n{\r\n    return 0;\r\n}\r\n",
    "| a | b |\n|---|:-:|\n| 1 | `x` |\n\n- [ ] todo\n  * nested\n",
    # logs
    "2024-05-17T08:03:12.482913Z INFO  [plc-07] cycle=12 ms temp=71.5°C ok",
    "May 17 08:03:12 gw kernel: [12345.678901] eth0: link up, 1000Mbps, full-duplex",
    "ERROR 0x80070005 at 0x00007ffd3c2a1b40: access denied (C:\\ProgramData\\Plant\\log.txt)",
    "127.0.0.1 - - [17/May/2024:08:03:12 +0200] \"GET /api/v1/tags?id=42&x=%20 HTTP/1.1\" 404 153",
    "/var/log/plant/line-3/2024-05-17_08.log.gz:1042: WARN valve V-101 stuck (3/5 retries)",
    "mac=de:ad:be:ef:00:01 ip=fe80::1ff:fe23:4567:890a%eth0 uuid=550e8400-e29b-41d4-a716-446655440000",
    "sha256:9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "modbus rx: 01 03 0C 00 64 01 F4 FF FF 00 00 3B 9A CA 00 A1 7C",
    "\tat com.plant.Io.read(Io.java:42)\n\tat com.plant.Main.main(Main.java:7)\nCaused by: x",
    "P=4.02bar;T=71.5C;F=12.0m3/h;S=OK;;", "alarm!!! >>> PUMP#2 <<< !!!", "[####----] 50%\r[########] 100%",
    # names of control tokens are text
    *("<|im_start|>user\nhi<|im_end|>\n", "<|endoftext|>", "<|begin_of_text|><|eot_id|>", "<|end|>"),
    *("[INST] x [/INST]", "<<SYS>>", "<end_of_turn>", "<|im_end", "im_end|>", "<pad>", "<0x0A>"),
]  # fmt: skip


def strings() -> list[str]:
    """The written strings, and mixtures of them up to NUM_STRINGS."""
    rng = random.Random(20240517)
    made = list(dict.fromkeys(WRITTEN))
    alphabet = "aB9 \n\t.'é中😀_-/:0\u0301\u3000ف한"
    while len(made) < NUM_STRINGS:
        if rng.random() < 0.5:
            made.append("".join(rng.choices(alphabet, k=rng.randint(5, 60))))
        else:
            parts = rng.sample([text for text in WRITTEN if len(text) < 60], 3)
            made.append(rng.choice(["", " ", "\n", "  "]).join(parts))
    return made[:NUM_STRINGS]


def token_ids(path: Path, texts: list[str]) -> list[list[int]]:
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [list(model.tokenize(text.encode(), add_bos=False, special=False)) for text in texts]


def main() -> None:
    smollm2, folder = map(Path, sys.argv[1:])
    texts = strings()
    (DATA / "hard_strings.json").write_text(
        "[\n" + ",\n".join(map(json.dumps, texts)) + "\n]\n", encoding="utf-8"
    )
    rows = [json.dumps(ids, separators=(",", ":")) for ids in token_ids(smollm2, texts)]
    (DATA / "hard_strings_smollm2.json").write_text("[\n" + ",\n".join(rows) + "\n]\n")
    arrays: dict[str, Any] = {}
    for name in VOCABULARIES:
        ids = token_ids(folder / f"ggml-vocab-{name}.gguf", texts)
        arrays[f"{name}.ids"] = np.array([i for row in ids for i in row], np.int32)
        arrays[f"{name}.lengths"] = np.array([len(row) for row in ids], np.int32)
    np.savez_compressed(DATA / "hard_strings_vocabularies.npz", **arrays)


if __name__ == "__main__":
    main()
