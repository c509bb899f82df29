"""Plug-ins for other inference engines: each host says where a call stands in its own way, the engine is the same."""
