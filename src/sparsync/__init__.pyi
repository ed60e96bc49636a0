"""The public names, each listed once: `lazy_names` loads them from here. Schemes that are used less often are in `sparsync.schemes`."""

from sparsync import schemes as schemes
from sparsync import testing as testing
from sparsync.attached import checkpoint as checkpoint
from sparsync.attached.attach import attach as attach
from sparsync.attached.doctor import doctor as doctor
from sparsync.attached.manual import GradientReducer as GradientReducer
from sparsync.base.error_feedback import ErrorFeedbackScheme as ErrorFeedbackScheme
from sparsync.base.error_feedback import Update as Update
from sparsync.base.scheme import Scheme as Scheme
from sparsync.base.scheme_text import scheme as scheme
from sparsync.base.state import State as State
from sparsync.comm.announcement import RanksDifferError as RanksDifferError
from sparsync.comm.group import ConnectionLostError as ConnectionLostError
from sparsync.comm.group import GroupComm as GroupComm
from sparsync.comm.local import LocalWorld as LocalWorld
from sparsync.comm.metered import MeteredComm as MeteredComm
from sparsync.core import Bucket as Bucket
from sparsync.core import Comm as Comm
from sparsync.core import Cost as Cost
from sparsync.core import Report as Report
from sparsync.core import Span as Span
from sparsync.core import Sparse as Sparse
from sparsync.exchanges.adamw_steps import AdamWSteps as AdamWSteps
from sparsync.exchanges.local_options import LocalSteps as LocalSteps
from sparsync.exchanges.local_options import OuterSGD as OuterSGD
from sparsync.exchanges.steps_options import Steps as Steps
from sparsync.feedback import Accumulator as Accumulator
from sparsync.runtime.handle import Gradients as Gradients
from sparsync.runtime.handle import Handle as Handle
from sparsync.runtime.options import Options as Options
from sparsync.runtime.snapshot import Snapshot as Snapshot
from sparsync.schemes.dense import Dense as Dense
from sparsync.schemes.micro import MiCRO as MiCRO
from sparsync.schemes.oktopk import OkTopk as OkTopk
from sparsync.schemes.skip_reduce import SkipReduce as SkipReduce
from sparsync.schemes.topk_allgather import TopK as TopK
from sparsync.schemes.two_shot import TwoShot as TwoShot

__version__: str
__all__: list[str]
