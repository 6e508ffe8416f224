"""headrace: deploys small language models on RK3588 boards."""

__version__ = "0.1.0"
