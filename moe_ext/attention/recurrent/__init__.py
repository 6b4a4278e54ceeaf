"""Recurrences over sharded sequences: delta rules, state spaces, convolutions."""
