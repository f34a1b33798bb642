"""Moving KV between pages and transfer buffers, and into pages, in place."""

from kernels_pallas.kv_pages.api import Piece as Piece
from kernels_pallas.kv_pages.api import append as append
from kernels_pallas.kv_pages.api import pack as pack
from kernels_pallas.kv_pages.api import unpack as unpack
