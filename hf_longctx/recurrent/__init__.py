"""Adapt recurrent layers of Transformers models, so that packed documents stay apart in them."""
