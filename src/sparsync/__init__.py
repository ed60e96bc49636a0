"""Sparse and skipping gradient synchronisation for PyTorch: the public names, loaded when first used."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsync import integrations as integrations
    from sparsync import schemes as schemes
    from sparsync import testing as testing
    from sparsync.base.error_feedback import DenseUpdate as DenseUpdate
    from sparsync.base.error_feedback import ErrorFeedbackScheme as ErrorFeedbackScheme
    from sparsync.base.error_feedback import Update as Update
    from sparsync.base.scheme import Scheme as Scheme
    from sparsync.base.scheme_text import scheme as scheme
    from sparsync.comm.announcement import RanksDifferError as RanksDifferError
    from sparsync.comm.group import ConnectionLostError as ConnectionLostError
    from sparsync.comm.group import GroupComm as GroupComm
    from sparsync.comm.local import LocalWorld as LocalWorld
    from sparsync.comm.metered import MeteredComm as MeteredComm
    from sparsync.core import Bucket as Bucket
    from sparsync.core import Comm as Comm
    from sparsync.core import Cost as Cost
    from sparsync.core import NonFiniteError as NonFiniteError
    from sparsync.core import ParameterSpan as ParameterSpan
    from sparsync.core import Report as Report
    from sparsync.core import Span as Span
    from sparsync.core import Sparse as Sparse
    from sparsync.feedback import Accumulator as Accumulator
    from sparsync.integrations import checkpoint as checkpoint
    from sparsync.integrations.adamw_steps import AdamWSteps as AdamWSteps
    from sparsync.integrations.attach import attach as attach
    from sparsync.integrations.comm_hook import ddp_comm_hook as ddp_comm_hook
    from sparsync.integrations.doctor import doctor as doctor
    from sparsync.integrations.local_steps import LocalSteps as LocalSteps
    from sparsync.integrations.local_steps import OuterSGD as OuterSGD
    from sparsync.integrations.manual import GradientReducer as GradientReducer
    from sparsync.integrations.manual import reduce_gradients as reduce_gradients
    from sparsync.integrations.parameter_format import ParameterFormat as ParameterFormat
    from sparsync.schemes.auto_protect import AutoProtect as AutoProtect
    from sparsync.schemes.demo import DeMo as DeMo
    from sparsync.schemes.dense import Dense as Dense
    from sparsync.schemes.dgc import DGC as DGC
    from sparsync.schemes.exdyna import ExDyna as ExDyna
    from sparsync.schemes.micro import MiCRO as MiCRO
    from sparsync.schemes.oktopk import OkTopk as OkTopk
    from sparsync.schemes.onebit_adam import OneBitAdam as OneBitAdam
    from sparsync.schemes.per_parameter import PerParameter as PerParameter
    from sparsync.schemes.powersgd import PowerSGD as PowerSGD
    from sparsync.schemes.quantized import Quantized as Quantized
    from sparsync.schemes.random_k import RandomK as RandomK
    from sparsync.schemes.random_pruning import RandomPruning as RandomPruning
    from sparsync.schemes.skip_reduce import SkipReduce as SkipReduce
    from sparsync.schemes.sparse_loco import SparseLoCo as SparseLoCo
    from sparsync.schemes.topk_allgather import TopK as TopK
    from sparsync.schemes.topk_dsa import TopKDSA as TopKDSA
    from sparsync.schemes.two_shot import TwoShot as TwoShot

# Importing torch takes longer than `sparsync --help` may, so each name says where it lives and is fetched on first use.
_HOME = {
    "Accumulator": "sparsync.feedback",
    "AdamWSteps": "sparsync.integrations.adamw_steps",
    "Comm": "sparsync.core",
    "NonFiniteError": "sparsync.core",
    "Sparse": "sparsync.core",
    "AutoProtect": "sparsync.schemes.auto_protect",
    "Bucket": "sparsync.core",
    "Cost": "sparsync.core",
    "Dense": "sparsync.schemes.dense",
    "DenseUpdate": "sparsync.base.error_feedback",
    "ErrorFeedbackScheme": "sparsync.base.error_feedback",
    "ExDyna": "sparsync.schemes.exdyna",
    "GradientReducer": "sparsync.integrations.manual",
    "ConnectionLostError": "sparsync.comm.group",
    "GroupComm": "sparsync.comm.group",
    "RanksDifferError": "sparsync.comm.announcement",
    "LocalSteps": "sparsync.integrations.local_steps",
    "LocalWorld": "sparsync.comm.local",
    "MeteredComm": "sparsync.comm.metered",
    "MiCRO": "sparsync.schemes.micro",
    "OkTopk": "sparsync.schemes.oktopk",
    "OuterSGD": "sparsync.integrations.local_steps",
    "PerParameter": "sparsync.schemes.per_parameter",
    "RandomPruning": "sparsync.schemes.random_pruning",
    "Report": "sparsync.core",
    "Scheme": "sparsync.base.scheme",
    "SkipReduce": "sparsync.schemes.skip_reduce",
    "ParameterFormat": "sparsync.integrations.parameter_format",
    "ParameterSpan": "sparsync.core",
    "Span": "sparsync.core",
    "DeMo": "sparsync.schemes.demo",
    "DGC": "sparsync.schemes.dgc",
    "OneBitAdam": "sparsync.schemes.onebit_adam",
    "PowerSGD": "sparsync.schemes.powersgd",
    "Quantized": "sparsync.schemes.quantized",
    "RandomK": "sparsync.schemes.random_k",
    "SparseLoCo": "sparsync.schemes.sparse_loco",
    "TopK": "sparsync.schemes.topk_allgather",
    "TopKDSA": "sparsync.schemes.topk_dsa",
    "TwoShot": "sparsync.schemes.two_shot",
    "Update": "sparsync.base.error_feedback",
    "attach": "sparsync.integrations.attach",
    "ddp_comm_hook": "sparsync.integrations.comm_hook",
    "doctor": "sparsync.integrations.doctor",
    "reduce_gradients": "sparsync.integrations.manual",
    "scheme": "sparsync.base.scheme_text",
}
_MODULES = {
    "checkpoint": "sparsync.integrations.checkpoint",
    "integrations": "sparsync.integrations",
    "schemes": "sparsync.schemes",
    "testing": "sparsync.testing",
}
__all__ = [
    "DGC",
    "Accumulator",
    "AdamWSteps",
    "AutoProtect",
    "Bucket",
    "Comm",
    "ConnectionLostError",
    "Cost",
    "DeMo",
    "Dense",
    "DenseUpdate",
    "ErrorFeedbackScheme",
    "ExDyna",
    "GradientReducer",
    "GroupComm",
    "LocalSteps",
    "LocalWorld",
    "MeteredComm",
    "MiCRO",
    "NonFiniteError",
    "OkTopk",
    "OneBitAdam",
    "OuterSGD",
    "ParameterFormat",
    "ParameterSpan",
    "PerParameter",
    "PowerSGD",
    "Quantized",
    "RandomK",
    "RandomPruning",
    "RanksDifferError",
    "Report",
    "Scheme",
    "SkipReduce",
    "Span",
    "Sparse",
    "SparseLoCo",
    "TopK",
    "TopKDSA",
    "TwoShot",
    "Update",
    "attach",
    "checkpoint",
    "ddp_comm_hook",
    "doctor",
    "integrations",
    "reduce_gradients",
    "scheme",
    "schemes",
    "testing",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'sparsync' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
