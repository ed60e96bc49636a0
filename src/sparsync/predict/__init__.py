"""Predict what a step costs, from closed forms and measured links, without running it."""

from sparsync.predict.plan import Exchange as Exchange
from sparsync.predict.plan import Given as Given
from sparsync.predict.plan import Plan as Plan
from sparsync.predict.plans import adamw_steps as adamw_steps
from sparsync.predict.plans import local_steps as local_steps
from sparsync.predict.plans import plan as plan
