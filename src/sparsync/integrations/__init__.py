"""Integrations: where a training loop hands over its gradients."""
