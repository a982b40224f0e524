"""How bytes travel between ranks: channels over gloo or within one process, and rank processes."""
