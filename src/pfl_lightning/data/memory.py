"""How much memory there is."""

import os

import torch


def free_memory(device: torch.device) -> int:
    """Bytes that tensors may take on a device."""
    if device.type == "cuda":
        # what torch's allocator holds and doesn't use is free too
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if "SC_AVPHYS_PAGES" in getattr(os, "sysconf_names", {}):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # a system that doesn't tell
    return 2**31
