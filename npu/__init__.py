"""The NPU path of the RK3588."""
