"""The public names, each listed once: `lazy_names` loads them from here. All schemes are in `sparsync.schemes`."""

from sparsync import comm as comm
from sparsync import schemes as schemes
from sparsync import testing as testing
from sparsync.attached import checkpoint as checkpoint
from sparsync.attached.attach import attach as attach
from sparsync.attached.doctor import doctor as doctor
from sparsync.attached.manual import GradientReducer as GradientReducer
from sparsync.base.error_feedback import ErrorFeedbackScheme as ErrorFeedbackScheme
from sparsync.base.scheme import Scheme as Scheme
from sparsync.comm.announcement import RanksDifferError as RanksDifferError
from sparsync.comm.group import ConnectionLostError as ConnectionLostError
from sparsync.core import Bucket as Bucket
from sparsync.core import Comm as Comm
from sparsync.core import Report as Report
from sparsync.exchanges.adamw_steps import AdamWSteps as AdamWSteps
from sparsync.exchanges.steps_options import LocalSteps as LocalSteps
from sparsync.exchanges.steps_options import OuterSGD as OuterSGD
from sparsync.exchanges.steps_options import Steps as Steps
from sparsync.runtime.handle import Gradients as Gradients
from sparsync.runtime.handle import Handle as Handle
from sparsync.runtime.options import Options as Options
from sparsync.runtime.restorable import Snapshot as Snapshot

__version__: str
__all__: list[str]
