"""Graphs by ONNX Runtime, as the exporter runs them."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort


def cpu_session(model: Path | bytes, folder: Path | None = None) -> ort.InferenceSession:
    """A file's session; or of a serialised model, whose weights' files are in `folder`."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    if folder is not None:
        key = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(key, str(folder.absolute()))
    source = model if isinstance(model, bytes) else str(model)
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
