"""The base class of all schemes, the driver of those with error feedback, and the registry of names."""
