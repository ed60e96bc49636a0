"""`sparsync launch`: run an unchanged torch.distributed script, one rank per network namespace, over links of a chosen rate.

`settings` holds the request and each rank's environment. `supervisor` builds the network, starts the ranks, shows their output and stops
them; `traffic` measures, and `faults` injects faults.
"""
