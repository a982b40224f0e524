"""Where the tokens of a batch lie: layouts, nested domains of ranks, and the cost of attention."""
