"""From measured errors to one threshold for each head under a budget."""
