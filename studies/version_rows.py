"""The rows of the table of versions in docs/what_works.md: a short name, and what was done where the table says that it works."""

ROWS = {
    "the package": "wheel built and installed, every public name imported",
    "the command": "`pip install ./lab`, and `sparsync compare` with a job by `sparsync workloads --new job.py`",
    "C++ kernels": "the C++ kernels; without them the slow ones run, with the same results",
    "schemes": "six schemes in a `LocalWorld` of 4: nothing is lost, and replicas are the same",
    "GradientReducer": "`GradientReducer`: the same bits as in a `LocalWorld`",
    "DDP": "`attach`, DistributedDataParallel: the same bits",
    "DDP, failure": "the same, after a rank fails in a step",
    "checkpoint": "the same, saved on 3 ranks and resumed on 2",
    "LocalSteps": "`LocalSteps`: two trainings on two ranks end the same",
    "AdamWSteps": "`AdamWSteps`: the same",
    "FSDP2, replicate": "`attach`, FSDP2, `replicate=`: the same bits",
    "FSDP2, two axes": "`attach`, FSDP2 with a mesh of two axes: the same as `replicate=`",
    "FSDP2, shard": "`attach`, FSDP2, shard axis: the same bits",
    "FSDP2, parameters": '`attach(parameters="float32")`: gradients are exact',
    "FSDP2, unused": "FSDP2, a parameter that gets no gradient in a step",
    "FSDP2, failure": "FSDP2, going on after a step that failed",
}
