"""Ring attention in models of Hugging Face transformers 5."""
