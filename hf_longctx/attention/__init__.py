"""The attention functions that Transformers calls under our names, and their masks."""
