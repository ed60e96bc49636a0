"""Predict what a step costs, from closed forms and measured links, without running it."""

from sparsync.comm.plan import Exchange as Exchange
from sparsync.comm.plan import Given as Given
from sparsync.comm.plan import Plan as Plan
from sparsync_lab.predict.plans import adamw_steps as adamw_steps
from sparsync_lab.predict.plans import local_steps as local_steps
from sparsync_lab.predict.plans import plan as plan
