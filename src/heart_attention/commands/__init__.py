"""One file a topic of the command line; `cli.py` calls `register` of each."""
