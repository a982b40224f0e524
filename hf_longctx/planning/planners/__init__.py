"""One file per algorithm: layout -> one program per rank."""
