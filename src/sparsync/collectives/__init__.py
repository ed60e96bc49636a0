"""Collectives made of the four operations of a communicator, with their exchanges in closed form beside them."""
