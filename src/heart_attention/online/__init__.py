"""A call: clock, reuse, engine, cost model, statistics."""
