"""One way in under any wrapper: `attach`, its handles for DDP, FSDP2 and bare models, checkpoints and the doctor."""
