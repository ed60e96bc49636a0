"""The choice of the elements that a step sends."""
