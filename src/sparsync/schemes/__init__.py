"""One scheme a file; `sparsync.base.registry` finds them by name."""

from sparsync.base.registry import describe as describe
from sparsync.base.registry import get as get
from sparsync.base.registry import names as names
from sparsync.base.registry import settings as settings
