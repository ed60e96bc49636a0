"""Faults for ranks that train with `sparsync_elastic`, as `sparsync launch` and `sparsync compare` give them.

`plan` is what a user writes and what a seed draws, `injector` gives it to processes and keeps their store, and `pauses` says for how long
ranks stood still.
"""
