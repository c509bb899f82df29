"""Training of the embedded model: ``python -m tools.train_tiny`` (see README.md here)."""
