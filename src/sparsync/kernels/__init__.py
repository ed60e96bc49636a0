"""The hot loops over whole vectors, one signature each; `reference` is their specification in plain torch."""
