"""All scheme classes of the library, functions that look schemes up by name, and the types that a custom scheme needs."""

from sparsync.base.error_feedback import Update as Update
from sparsync.base.registry import describe as describe
from sparsync.base.registry import get as get
from sparsync.base.registry import names as names
from sparsync.base.registry import settings as settings
from sparsync.base.scheme_text import from_text as from_text
from sparsync.base.state import State as State
from sparsync.core import Span as Span
from sparsync.core import Sparse as Sparse
from sparsync.feedback import Accumulator as Accumulator
from sparsync.schemes.auto_protect import AutoProtect as AutoProtect
from sparsync.schemes.dense import Dense as Dense
from sparsync.schemes.exact_exdyna import ExactExDyna as ExactExDyna
from sparsync.schemes.exact_micro import ExactMiCRO as ExactMiCRO
from sparsync.schemes.exact_oktopk import ExactOkTopk as ExactOkTopk
from sparsync.schemes.exdyna import ExDyna as ExDyna
from sparsync.schemes.in_turn import InTurn as InTurn
from sparsync.schemes.micro import MiCRO as MiCRO
from sparsync.schemes.oktopk import OkTopk as OkTopk
from sparsync.schemes.per_parameter import PerParameter as PerParameter
from sparsync.schemes.quantized import Quantized as Quantized
from sparsync.schemes.skip_reduce import SkipReduce as SkipReduce
from sparsync.schemes.topk_allgather import TopK as TopK
from sparsync.schemes.two_shot import TwoShot as TwoShot

__all__: list[str]
