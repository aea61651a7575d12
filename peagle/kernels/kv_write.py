"""Write new keys and values into the paged cache."""

from torch import Tensor

from peagle.kernels.backend import use_triton


def kv_write(
    key_cache_MSD: Tensor,
    value_cache_MSD: Tensor,
    slots_R: Tensor,
    keys_RMD: Tensor,
    values_RMD: Tensor,
    *,
    backend: str = "auto",
) -> None:
    """Store row r's keys and values at slot `slots[r]` of one layer's caches, in place; -1 stores nothing a row reads.

    Keys and values may be slices of a wider projection. No slot is given twice, -1 aside. The last slot of a cache
    belongs to no block: the torch form uses it. `backend` "auto" is Triton on CUDA.
    """
    if not use_triton(backend, key_cache_MSD.device):
        kv_write_ref(key_cache_MSD, slots_R, keys_RMD)
        kv_write_ref(value_cache_MSD, slots_R, values_RMD)
        return
    from peagle.kernels.kv_write_triton import kv_write_triton

    kv_write_triton(key_cache_MSD, value_cache_MSD, slots_R, keys_RMD, values_RMD)


def kv_write_ref(cache_MSD: Tensor, slots_R: Tensor, values_RMD: Tensor) -> None:
    """The torch form of `kv_write`, of one cache. Rows with slot -1 land in the cache's last slot, which no block owns.

    That spare slot lets every row be written without a device-to-host look at which rows are real.
    """
    slots_R = slots_R.where(slots_R >= 0, cache_MSD.shape[1] - 1)
    cache_MSD.index_copy_(1, slots_R, values_RMD.transpose(0, 1).to(cache_MSD.dtype))
