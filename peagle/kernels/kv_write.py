"""Write new keys and values into the paged cache."""

from torch import Tensor


def kv_write_ref(cache_MSD: Tensor, slots_R: Tensor, values_RMD: Tensor) -> None:
    """Store row r at slot `slots[r]`, in place. Rows with slot -1 land in the cache's last slot, which no block owns.

    That spare slot lets every row be written without a device-to-host look at which rows are real.
    """
    slots_R = slots_R.where(slots_R >= 0, cache_MSD.shape[1] - 1)
    cache_MSD.index_copy_(1, slots_R, values_RMD.transpose(0, 1).to(cache_MSD.dtype))
