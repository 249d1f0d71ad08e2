"""Checks and reports: what was measured, against which limit, and how it is shown."""
