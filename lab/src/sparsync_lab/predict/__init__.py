"""Predict the cost of a training step from closed forms and measured links, without running it."""

from sparsync_lab.predict.exchanges import Exchange as Exchange
from sparsync_lab.predict.exchanges import Given as Given
from sparsync_lab.predict.exchanges import Plan as Plan
from sparsync_lab.predict.schemes import adamw_steps as adamw_steps
from sparsync_lab.predict.schemes import form as form
from sparsync_lab.predict.schemes import local_steps as local_steps
from sparsync_lab.predict.schemes import plan as plan
from sparsync_lab.predict.schemes import plan_of as plan_of
