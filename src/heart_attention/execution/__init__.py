"""Where tasks run: here or on a Ray cluster."""
