"""One small file for each family of video transformers."""
