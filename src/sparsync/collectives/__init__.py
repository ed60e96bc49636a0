"""Collectives built from the four operations of a communicator, documented with their steps and bytes."""
