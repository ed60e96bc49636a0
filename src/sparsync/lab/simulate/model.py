"""Predict the step of a set-up: its schemes' plans, its network, and its timeline."""

import math
from dataclasses import dataclass, replace

from sparsync.base.scheme_text import made
from sparsync.lab.simulate.setup import Entry, NetworkSettings, SetUp
from sparsync.predict.network import Link, Network, Tier, Tiers, bundled
from sparsync.predict.plans import plan
from sparsync.predict.timeline import Timeline, even_buckets, overlapped, periodic, serial

RANKS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
GBIT_PER_S = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 400.0)


@dataclass(frozen=True)
class Predicted:
    """The step of one scheme on one network; `nbytes` is what a rank sends in a step, on average over the steps."""

    label: str
    ranks: int
    gbit_per_s: float
    step_s: float
    communication_s: float
    exposed_s: float
    nbytes: float
    throughput: float  # of all ranks, in the job's unit a second


def network_of(settings: NetworkSettings) -> Tiers:
    """Return the network of a set-up."""
    between = Link(
        settings.gbit_per_s * 1e9,
        settings.latency_us * 1e-6,
        settings.per_message_us * 1e-6,
        settings.down_gbit_per_s * 1e9 or None,
    ).derated(settings.efficiency)
    node = bundled(between, settings.links_per_node)
    tiers = [Tier(1, (node,))]
    if settings.ranks_per_node > 1:
        inside = Link(
            settings.inside_gbit_per_s * 1e9, settings.inside_latency_us * 1e-6, settings.per_message_us * 1e-6
        )
        tiers = [Tier(1, (inside,)), Tier(settings.ranks_per_node, (node,))]
    if settings.ranks_per_leaf:
        links = settings.ranks_per_leaf / settings.ranks_per_node / settings.oversubscription
        spine = replace(node, bandwidth_bits_per_s=links * node.bandwidth_bits_per_s)
        tiers.append(Tier(settings.ranks_per_leaf, (spine,)))
    return Tiers(tuple(tiers), settings.all_reduce, settings.rings)  # pyright: ignore[reportArgumentType]


def predict(setup: SetUp, entry: Entry, ranks: int | None = None, gbit_per_s: float | None = None) -> Predicted:
    """Return the step of one scheme of a set-up, at its own number of ranks and rate of links where none is given."""
    job, P = setup.job, ranks or setup.job.ranks
    rate = gbit_per_s or setup.network.gbit_per_s
    network = network_of(replace(setup.network, gbit_per_s=rate))
    if entry.every > 1:
        return _every_so_often(setup, entry, network, P, rate)
    count = bucket_count(job.elements * job.itemsize, job.bucket_mb)
    seconds, nbytes = reduction(setup, entry, network, job.elements // count, P)
    ready = even_buckets(job.forward_s, job.backward_s, count)
    backward_end_s = job.forward_s + job.backward_s
    step: Timeline = (
        overlapped(ready, [seconds] * count, backward_end_s, job.optimizer_s)
        if job.overlap
        else serial([seconds] * count, backward_end_s, job.optimizer_s)
    )
    return _predicted(setup, entry, P, rate, step.step_s, count * seconds, count * nbytes)


def reduction(setup: SetUp, entry: Entry, network: Network, n: int, P: int) -> tuple[float, float]:
    """Return the seconds in which a scheme reduces one bucket of n elements, and the bytes that the busiest rank sends."""
    planned = plan(made(entry.name, dict(entry.settings)), n, P, itemsize=setup.job.itemsize)
    seconds = sum(network.seconds(exchange, P) for exchange in planned.exchanges)
    if setup.memory_gb_per_s:
        seconds += planned.passes / (setup.memory_gb_per_s * 1e9)
    return seconds, float(sum(exchange.nbytes for exchange in planned.exchanges))


def bucket_count(nbytes: int, bucket_mb: float) -> int:
    """Return how many buckets of `bucket_mb` a gradient makes; 1 for 0."""
    return max(1, math.ceil(nbytes / (bucket_mb * 2**20))) if bucket_mb else 1


def _every_so_often(setup: SetUp, entry: Entry, network: Network, P: int, rate: float) -> Predicted:
    job = setup.job
    seconds, nbytes = reduction(setup, entry, network, job.elements // entry.fragments, P)
    total_s = entry.fragments * seconds
    step_s = periodic(job.compute_s, entry.every, total_s, entry.fragments, entry.delay)
    return _predicted(setup, entry, P, rate, step_s, total_s / entry.every, entry.fragments * nbytes / entry.every)


def _predicted(
    setup: SetUp, entry: Entry, P: int, rate: float, step_s: float, communication_s: float, nbytes: float
) -> Predicted:
    exposed_s = step_s - setup.job.compute_s
    return Predicted(entry.label, P, rate, step_s, communication_s, exposed_s, nbytes, P * setup.job.samples / step_s)
