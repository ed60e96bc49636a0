"""Collectives made of the four operations of a communicator: one algorithm a file, its cost in closed form beside it."""
