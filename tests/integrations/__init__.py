"""Every situation behind every integration with every scheme: what works, and what is refused. docs/what_works.md has it as a table."""
