"""Predict what a step costs, from closed forms and measured links, without running it."""

from sparsync.predict.plan import Exchange as Exchange
from sparsync.predict.plan import Plan as Plan
