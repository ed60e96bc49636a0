"""What schemes send, select and keep back on a reproducible stream of gradients, in this process: no network, no training."""
