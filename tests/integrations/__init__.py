"""Every situation behind every integration with every scheme: what works, and what is refused; docs/integrations.md is made from it."""
