"""seccomp_filter: the kernel's calls that sandboxed code may not make, as a program for the kernel's filter.

The namespaces hide the host; this filter keeps code from the parts of the kernel that have no namespace, that
make new ones, or that hold memory which no limit counts.
"""

import platform
import struct

REFUSED = {
    name: (int(x86_64) if x86_64 != "-" else None, int(aarch64) if aarch64 != "-" else None)
    for name, x86_64, aarch64 in map(
        str.split,
        """
        acct 163 89|add_key 248 217|adjtimex 159 171|bpf 321 280|chroot 161 51|clock_adjtime 305 266
        clock_settime 227 112|delete_module 176 106|fanotify_init 300 262|finit_module 313 273
        get_mempolicy 239 236|init_module 175 105|ioperm 173 -|iopl 172 -|kcmp 312 272
        kexec_file_load 320 294|kexec_load 246 104|keyctl 250 219|lookup_dcookie 212 18|mbind 237 235
        memfd_create 319 279|migrate_pages 256 238|modify_ldt 154 -|mount 165 40|move_pages 279 239
        mq_open 240 180|msgget 68 186|name_to_handle_at 303 264|nfsservctl 180 42|open_by_handle_at 304 265
        perf_event_open 298 241|pivot_root 155 41|process_vm_readv 310 270|process_vm_writev 311 271
        ptrace 101 117|quotactl 179 60|reboot 169 142|request_key 249 218|semget 64 190
        set_mempolicy 238 237|setdomainname 171 162|sethostname 170 161|setns 308 268|settimeofday 164 170
        shmget 29 194|swapoff 168 225|swapon 167 224|syslog 103 116|umount2 166 39|unshare 272 97
        userfaultfd 323 282|vmsplice 278 75
        """.replace("\n", "|")
        .strip(" |")
        .split("|"),
    )
}
"""Numbers of x86_64 and aarch64; None where a machine lacks the call. The answer is EPERM."""
FIRST_SHARED = 424
"""From here on a call has the same number on every machine."""
SHARED_ALLOWED = {
    "pidfd_send_signal": 424,
    "pidfd_open": 434,
    "close_range": 436,
    "openat2": 437,
    "faccessat2": 439,
    "epoll_pwait2": 441,
    "futex_waitv": 449,
    "fchmodat2": 452,
    "futex_wake": 454,
    "futex_wait": 455,
    "futex_requeue": 456,
}
"""Of the newer calls these alone; for any other the answer is ENOSYS, as from an older kernel."""
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column of the table, AUDIT_ARCH
_CLONE, _SOCKET = (56, 220), (41, 198)
_NEW_NAMESPACES = 0x7E020000  # CLONE_NEW*
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6
_X32 = 0x40000000  # calls of another ABI of x86_64
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data, little-endian
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000


def seccomp_filter() -> bytes:
    """For bwrap's --seccomp. Raises ValueError on a machine whose calls have other numbers."""
    if (machine := platform.machine()) not in _MACHINES:
        raise ValueError(f"the system calls of {machine} are not known; use {' or '.join(_MACHINES)}")
    column, arch = _MACHINES[machine]
    program = [_load(_ARCH), _jump(_EQUAL, arch, 1, 0), _error(_ENOSYS), _load(_NUMBER)]
    for allowed in SHARED_ALLOWED.values():
        program += [_jump(_EQUAL, allowed, 0, 1), _return(_ALLOW)]
    assert _X32 > FIRST_SHARED  # calls of the other ABI are refused with the newer ones
    program += [_jump(_AT_LEAST, FIRST_SHARED, 0, 1), _error(_ENOSYS)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            program += [_jump(_EQUAL, number, 0, 1), _error(_EPERM)]
    program += [_jump(_EQUAL, _CLONE[column], 0, 4), _load(_FIRST_ARGUMENT)]
    program += [_jump(_ANY_BIT, _NEW_NAMESPACES, 0, 1), _error(_EPERM), _return(_ALLOW)]
    program += [_jump(_EQUAL, _SOCKET[column], 0, 2 + 2 * len(_FAMILIES)), _load(_FIRST_ARGUMENT)]
    for family in _FAMILIES:
        program += [_jump(_EQUAL, family, 0, 1), _return(_ALLOW)]
    program += [_error(_EAFNOSUPPORT), _return(_ALLOW)]
    return b"".join(program)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    """Skip so many of the instructions that follow."""
    return struct.pack("=HBBI", test, if_true, if_false, value)


def _load(offset: int) -> bytes:
    return struct.pack("=HBBI", _LOAD, 0, 0, offset)


def _return(action: int) -> bytes:
    return struct.pack("=HBBI", _RETURN, 0, 0, action)


def _error(number: int) -> bytes:
    return _return(_ERROR | number)
