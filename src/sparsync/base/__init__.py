"""What a scheme is: the base class, the driver of all schemes with error feedback, and the registry of names."""
