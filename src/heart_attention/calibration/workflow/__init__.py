"""The order of a calibration's work: settings, plan, tasks, store."""
