"""The types of a plan. They live on a lower floor, where schemes give their closed forms."""

from sparsync.comm.plan import Exchange as Exchange
from sparsync.comm.plan import Given as Given
from sparsync.comm.plan import Kind as Kind
from sparsync.comm.plan import Peers as Peers
from sparsync.comm.plan import Plan as Plan
