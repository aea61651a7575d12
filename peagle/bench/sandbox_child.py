"""Run one program that nobody has read, in a process that gave up everything it does not need. Run by `sandbox.py`.

`python -I -B sandbox_child.py MODE SECONDS BYTES` reads a secret line and the program from stdin. The secret is
written to stdout only when the program has run to its end, so neither an exit status nor printed text can stand in for
it. Memory, CPU time, files and processes have limits; in the mode `filter` the kernel also refuses every system call
that would start a program or a process, send a signal, open a socket, or write, make or remove a file. The mode `probe`
only says which of `filter` and `limits` this machine has. It imports nothing of the project: it runs alone.
"""

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

# System calls that are refused, their numbers on (x86_64, aarch64); -1: not there.
_REFUSED = {
    "execve": (59, 221), "execveat": (322, 281), "fork": (57, -1), "vfork": (58, -1),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "setsid": (112, 157), "setpgid": (109, 154), "prlimit64": (302, 261), "setrlimit": (160, 164),
    "creat": (85, -1), "truncate": (76, 45), "memfd_create": (319, 279), "open_by_handle_at": (304, 265),
    "mkdir": (83, -1), "mkdirat": (258, 34), "rmdir": (84, -1), "unlink": (87, -1), "unlinkat": (263, 35),
    "rename": (82, -1), "renameat": (264, 38), "renameat2": (316, 276), "link": (86, -1), "linkat": (265, 37),
    "symlink": (88, -1), "symlinkat": (266, 36), "mknod": (133, -1), "mknodat": (259, 33),
    "chmod": (90, -1), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, -1),
    "fchown": (93, 55), "lchown": (94, -1), "fchownat": (260, 54), "utime": (132, -1), "utimes": (235, -1),
    "futimesat": (261, -1), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "reboot": (169, 142), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "swapon": (167, 224), "swapoff": (168, 225),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "bpf": (321, 280), "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425), "userfaultfd": (323, 282), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "acct": (163, 89), "quotactl": (179, 60), "iopl": (172, -1), "ioperm": (173, -1),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setaffinity": (203, 122), "sched_setattr": (314, 274),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sethostname": (170, 161),
    "setdomainname": (171, 162), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "syslog": (103, 116),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "mount_setattr": (442, 442),
}  # fmt: skip
# Calls whose arguments decide: (numbers, argument, how it is tested, value); "any" and "equal" refuse, "none" refuses
# where no bit of the value is set.
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD, _TIOCSTI = 0x10000, 0x5412
_JUDGED = (
    ((2, -1), 1, "any", _WRITES),  # open
    ((257, 56), 2, "any", _WRITES),  # openat
    ((56, 220), 0, "none", _CLONE_THREAD),  # clone: threads may be, processes not
    ((16, 29), 1, "equal", _TIOCSTI),  # ioctl that types into a terminal
    *(((72, 25), 1, "equal", command) for command in (8, 15)),  # fcntl that lets SIGIO go to others: F_SETOWN, ..._EX
    *(((16, 29), 1, "equal", request) for request in (0x8901, 0x8902)),  # ioctl that does: FIOSETOWN, SIOCSPGRP
)
# Newer forms whose arguments a filter cannot read: said not to exist, so that libraries take the older ones.
_ABSENT = ((435, 435), (437, 437))  # clone3, openat2
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_X32 = 0x40000000  # numbers from here on name the same calls another way
_SET_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2

Instruction = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


def filter_code(machine: str) -> list[Instruction]:
    """Instructions (operation, skip if true, skip if false, value) of the filter for a kind of processor."""
    which, architecture = _ARCHITECTURES[machine]
    refuse = (_RETURN, 0, 0, _ERROR | errno.EPERM)
    load_number = (_LOAD, 0, 0, 0)
    code = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), refuse, load_number, (_AT_LEAST, 0, 1, _X32), refuse]
    for numbers in _REFUSED.values():
        if numbers[which] >= 0:
            code += [(_EQUAL, 0, 1, numbers[which]), refuse]
    for numbers in _ABSENT:
        code += [(_EQUAL, 0, 1, numbers[which]), (_RETURN, 0, 0, _ERROR | errno.ENOSYS)]
    for numbers, argument, test, value in _JUDGED:
        if numbers[which] >= 0:
            operation = _EQUAL if test == "equal" else _ANY_BIT
            skips = (1, 0) if test == "none" else (0, 1)
            code += [(_EQUAL, 0, 4, numbers[which]), (_LOAD, 0, 0, 16 + 8 * argument), (operation, *skips, value)]
            code += [refuse, load_number]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def install_filter() -> bool:
    """Put the filter on this process, for good. False where the kernel or the processor has none."""
    if sys.platform != "linux" or platform.machine() not in _ARCHITECTURES:
        return False
    code = filter_code(platform.machine())
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    program = _Program(len(code), packed)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0) != 0:
        return False
    return bool(libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0) == 0)


def limit(seconds: int, size: int) -> None:
    """Limits that hold for this process; it cannot raise them once the filter is there."""
    for name, value in (
        ("RLIMIT_AS", size),
        ("RLIMIT_CPU", seconds),
        ("RLIMIT_FSIZE", 4096),  # the secret fits
        ("RLIMIT_CORE", 0),
        ("RLIMIT_NOFILE", 64),
        ("RLIMIT_NPROC", 0),  # means nothing to root
    ):
        if hasattr(resource, name):
            resource.setrlimit(getattr(resource, name), (value, value))


def main(mode: str, seconds: int, size: int) -> None:
    """Read, confine, run; say the secret when the program came to its end."""
    if mode == "probe":
        os.write(1, b"filter" if install_filter() else b"limits")
        return
    secret, _, program = sys.stdin.buffer.read().partition(b"\n")
    answer, null = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    limit(seconds, size)
    if mode == "filter" and not install_filter():
        os._exit(3)
    try:
        exec(compile(program, "answer", "exec"), {"__name__": "__main__"})
    except BaseException:  # SystemExit and whatever else the program raises: it did not come to its end
        os._exit(1)
    os.write(answer, secret)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
