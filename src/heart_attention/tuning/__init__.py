"""Settings found by looking at dense generations: the bound on drift, token orders."""
