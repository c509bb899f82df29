"""What attention is to be computed: block and cluster masks, where text lies, top-p selection.

A mask knows its density by token pairs, can be cut into heads and batch items and put together again, and
can be stored at one bit an entry. Shapes: B batch, H heads, N tokens, M blocks, C clusters.
"""

from .base import Mask, check_rest
from .block import BlockMask
from .cluster import ClusterMask, count_labels
from .group import GroupMask
from .packed import Packed, pack_bits, unpack_bits
from .select import top_p
from .text import Text

__all__ = [
    "BlockMask", "ClusterMask", "GroupMask", "Mask", "Packed", "Text", "check_rest", "count_labels",
    "pack_bits", "top_p", "unpack_bits",
]  # fmt: skip
