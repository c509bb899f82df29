"""Error-guided budgeted calibration (EBC): a threshold for every head, measured offline, under one budget.

trajectory → probes or gradients → error → solver → file. `draws` says which prompts and steps are measured;
`settings` → `planning` → `runner` → `methods`, `search` → `run` is the same road as a whole.
"""
