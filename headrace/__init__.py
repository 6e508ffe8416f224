"""headrace: deploys small language models on RK3588 boards.

from headrace import LLM, SamplingParams

with LLM("bundle") as llm:
    print(llm.chat([{"role": "user", "content": "What is a head race?"}]).text)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = ["LLM", "RuntimeConfig", "SamplingParams"]

if TYPE_CHECKING:
    from headrace.runtime.config import RuntimeConfig as RuntimeConfig
    from headrace.runtime.llm import LLM as LLM
    from headrace.runtime.request import SamplingParams as SamplingParams

_HOMES = {
    "LLM": "headrace.runtime.llm",
    "RuntimeConfig": "headrace.runtime.config",
    "SamplingParams": "headrace.runtime.request",
}


def __getattr__(name: str) -> Any:
    # Imported on use: `headrace --version` and the exporter need no runtime.
    if name not in _HOMES:
        raise AttributeError(f"module 'headrace' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
