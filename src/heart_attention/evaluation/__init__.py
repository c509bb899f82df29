"""Comparing methods: generations, metrics, tables, studies, the report."""
