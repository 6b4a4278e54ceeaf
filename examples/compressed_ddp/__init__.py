"""The parts of the example `train_compressed_ddp.py`."""
