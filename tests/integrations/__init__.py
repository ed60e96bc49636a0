"""Every situation behind every integration with every scheme: what works, and what is refused. docs/attach.md has it as a table."""
