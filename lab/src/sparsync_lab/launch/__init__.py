"""`sparsync launch`: an unchanged script of torch.distributed, one rank per network namespace, over links of a chosen rate.

`settings` is what was asked for, `variables` what each rank finds in its environment, `supervisor` the process that builds the network,
starts the ranks and stops them, with `output` and `traffic` for what it shows, and `command` the process that a user sees. Each of these
two ends everything when the other one is killed; see `workers.descendants`. Faults are in a package of their own.
"""
