"""Run a function on two processes that talk by gloo, as `torchrun` would start them."""

import os
import socket
import sys
from collections.abc import Callable

import torch
import torch.multiprocessing

from peagle.training.distributed import Ranks, process_group


def on_two_ranks(function: Callable[..., None], *arguments: object, device: str = "cpu") -> None:
    """Call `function(ranks, *arguments)` on both; a failure on either is raised here. Both must be picklable.

    With device "cuda" each has a GPU of its own and they talk by NCCL.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_run, (port, device, function, arguments), nprocs=2)


def _run(rank: int, port: int, device: str, function: Callable[..., None], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    # Both are here: without this, gloo and NCCL take the address that the machine's name stands for, if it does.
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(GLOO_SOCKET_IFNAME=loopback, NCCL_SOCKET_IFNAME=loopback)
    ranks = Ranks.from_environment(os.environ)
    with process_group(ranks, ranks.own_device(torch.device(device))):
        function(ranks, *arguments)
    # As the entry point does: at the interpreter's end a thread of gloo's can abort a process that has succeeded.
    sys.stdout.flush()
    os._exit(0)
