"""Measure schemes on a reproducible stream of gradients, in this process: their traffic, selections and residuals, without training."""
