"""What one rank does for a batch, as data: operations, programs, their checker and counters."""
