"""sparsync in trainers that own the training loop, and in dashboards. Elsewhere, as under Accelerate and Ray, call `sparsync.attach`.

Each module needs the package it is for, and nothing else here needs any.
"""
