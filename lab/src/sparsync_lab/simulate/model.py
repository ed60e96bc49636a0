"""Predict the step of a set-up with `predict.step_time`, from the network, plan and backward pass that its file describes."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparsync.base import scheme_text
from sparsync_lab.predict.exchanges import Given
from sparsync_lab.predict.network import Link, Nodes
from sparsync_lab.predict.schemes import plan_of
from sparsync_lab.predict.step_time import Ranks, even_backward, overlapped, periodic, serial
from sparsync_lab.simulate.setup import Entry, NetworkSettings, SetUp


@dataclass(frozen=True)
class Predicted:
    """The step of one scheme on one network; `nbytes` is sent by a rank per step, averaged over the steps."""

    label: str
    ranks: int
    gbit_per_s: float
    step_s: float
    communication_s: float
    exposed_s: float
    nbytes: float
    throughput: float  # of all ranks, in the job's unit per second


def predict(
    setup: SetUp,
    entry: Entry,
    ranks: int | None = None,
    gbit_per_s: float | None = None,
    figures: Mapping[str, Any] | None = None,  # as in Given
) -> Predicted:
    """Predict the step of one scheme; `ranks` and `gbit_per_s` override the set-up's."""
    job, P, rate = setup.job, ranks or setup.job.ranks, gbit_per_s or setup.network.gbit_per_s
    memory_s = 1 / (setup.memory.gb_per_s * 1e9) if setup.memory.gb_per_s else 0.0  # per byte
    group = Ranks(P, _network(setup.network, rate), lambda each: each.passes * memory_s)
    # Trainings that exchange weights every few steps exchange fragments; those that reduce gradients, buckets.
    buckets = max(1, math.ceil(job.elements * job.itemsize / (job.bucket_mb * 2**20))) if job.bucket_mb else 1
    count = entry.fragments if entry.every > 1 else buckets
    n = job.elements // count
    given = Given(n, P, job.itemsize, figures=figures or {})
    made = plan_of(scheme_text.made(entry.name, dict(entry.settings)), given)
    backward = even_backward([n] * count, job.forward_s, job.backward_s, job.optimizer_s)
    reduce_s = [group.seconds(made)] * count
    if entry.every > 1:
        step = periodic(backward, entry.every, sum(reduce_s), entry.fragments, entry.delay)
    else:
        step = (overlapped if job.overlap else serial)(backward, reduce_s)
    nbytes = count * sum(float(exchange.nbytes) for exchange in made.exchanges) / entry.every
    times = step.step_s, step.communication_s, step.exposed_s
    return Predicted(entry.label, P, rate, *times, nbytes, P * job.samples / step.step_s)


def _network(settings: NetworkSettings, gbit_per_s: float) -> Nodes:
    between = Link(gbit_per_s * 1e9, settings.latency_us * 1e-6)
    between = between.times(settings.efficiency).times(settings.links_per_node)
    inside = None
    if settings.ranks_per_node > 1:
        inside = Link(settings.inside_gbit_per_s * 1e9, settings.inside_latency_us * 1e-6)
    return Nodes(between, settings.ranks_per_node, inside, settings.all_reduce, settings.rings)
