"""Recurrences over sequences that ranks hold in parts: delta rules, state spaces, convolutions."""
