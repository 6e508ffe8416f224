"""What exporter and runtime both know: geometry, families, graph inputs, the bundle, the oracle."""
