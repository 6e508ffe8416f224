"""The runtime: loads a bundle and answers. Needs neither onnx nor torch."""
