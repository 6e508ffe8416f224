"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from headrace.export import demo_model


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as Q4_1 GGUF, from the cache folder."""
    return demo_model.obtain()
