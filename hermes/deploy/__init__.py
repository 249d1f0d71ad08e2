"""Onto the phone: what travels with the file, what is checked there, and how an app loads it."""
