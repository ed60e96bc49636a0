"""sparsync in trainers that own the training loop, and in dashboards. Elsewhere, as under Accelerate and Ray, call `sparsync.attach`.

A module needs only the package that it adapts to.
"""
