"""Which elements, and which parameters, are worth sending."""
