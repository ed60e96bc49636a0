"""The communicators that programs and tests create."""

from sparsync.comm.group import GroupComm as GroupComm
from sparsync.comm.local import LocalWorld as LocalWorld
from sparsync.comm.metered import MeteredComm as MeteredComm
from sparsync.core import Cost as Cost

__all__: list[str]
