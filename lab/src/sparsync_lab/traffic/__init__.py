"""The traffic, selections and residuals of schemes on a reproducible stream of gradients, in this process: no network, no training."""
