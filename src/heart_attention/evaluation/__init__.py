"""Evaluation: methods side by side, metrics, tables, studies and the report."""
