"""The parts of the example `train_long_context.py`."""
