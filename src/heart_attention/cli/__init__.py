"""The command `heart`, one file a topic."""
