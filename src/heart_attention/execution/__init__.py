"""Running many independent tasks: in this process, or on a Ray cluster."""
