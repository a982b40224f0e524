"""Move bytes between ranks: channels over gloo or between threads of one process, and bridges."""
