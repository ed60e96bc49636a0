"""`sparsync launch`: an unchanged script of torch.distributed, one rank per network namespace, over links of a chosen rate.

`settings` holds what was asked for and what a rank finds in its environment. `supervisor` builds the network, starts the ranks, shows what
they write, and stops them; `traffic` and `faults` are what it measures and what it disturbs.
"""
