"""Recurrent layers of Transformers models -> layers that keep packed documents apart."""
