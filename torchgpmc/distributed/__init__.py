"""Sampling by several processes, the ranks of ``torch.distributed``: chains over ranks, or data over ranks.

Importing this starts nothing: ranks meet when :func:`sample` or :meth:`ShardedGP.leading` is called.
"""

from torchgpmc.distributed.chains import sample
from torchgpmc.distributed.sharded import ShardedGP

__all__ = ["ShardedGP", "sample"]
