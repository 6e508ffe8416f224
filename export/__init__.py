"""The export stage: checkpoints in, bundles out. Runs on a PC; the board never imports it."""
