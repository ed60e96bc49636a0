"""What is exchanged in place of gradients, and when: the steps of an optimizer, and the changes of several local steps."""
