"""Exchanges in place of gradients: the steps of an optimizer, or the weight changes of several local steps."""
