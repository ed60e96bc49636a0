"""Below every integration: the connection to the other ranks, the thread that reduces, and the handle with its state."""
