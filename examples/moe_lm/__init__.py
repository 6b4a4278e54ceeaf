"""Parts of the example that trains a mixture-of-experts language model."""
