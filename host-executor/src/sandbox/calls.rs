//! The seccomp filters.

use std::collections::BTreeMap;

use libc::c_long;
use seccompiler::{
    BackendError, BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition,
    SeccompFilter, SeccompRule, sock_filter,
};

use super::profile::{FilterError, Profile, Role, SandboxError};

/// Conditions on the arguments of a call: the rule matches if one of them holds. Empty: the rule
/// always matches.
type Rules = BTreeMap<c_long, Vec<SeccompRule>>;

/// Installs the filters for all threads of the process.
pub(super) fn filter(profile: Profile, role: Role) -> Result<(), SandboxError> {
    let refuse = SeccompAction::Errno(libc::EPERM as u32);
    let (rules, listed, others) = match profile {
        Profile::Cpu => (allowed(role)?, SeccompAction::Allow, refuse),
        Profile::Driver => (refused(role)?, refuse, SeccompAction::Allow),
    };
    // First, because the list of the CPU engine allows no further filter.
    #[cfg(target_arch = "x86_64")]
    apply(&no_x32())?;
    // The flags of `clone3` are in memory, which a filter cannot read. The C library falls back to
    // `clone`, if `clone3` is not implemented.
    let clone3 = Rules::from([(libc::SYS_clone3, Vec::new())]);
    let no_clone3 = SeccompAction::Errno(libc::ENOSYS as u32);
    for (rules, listed, others) in [
        (clone3, no_clone3, SeccompAction::Allow),
        (rules, listed, others),
    ] {
        let architecture = std::env::consts::ARCH.try_into().map_err(failed)?;
        let filter = SeccompFilter::new(rules, others, listed, architecture).map_err(failed)?;
        let program: BpfProgram = filter.try_into().map_err(failed)?;
        apply(&program)?;
    }
    Ok(())
}

fn apply(program: &[sock_filter]) -> Result<(), SandboxError> {
    seccompiler::apply_filter_all_threads(program)
        .map_err(|error| SandboxError::Filter(FilterError::Kernel(error)))
}

/// A filter that refuses the system calls of the x32 ABI. To the kernel they have the same
/// architecture as the others, so the rules for a number do not match the same call of x32.
#[cfg(target_arch = "x86_64")]
fn no_x32() -> [sock_filter; 4] {
    const X32: u32 = 0x4000_0000; // __X32_SYSCALL_BIT of asm/unistd.h
    let line = |code: u32, jt, jf, k| sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    let refuse = libc::SECCOMP_RET_ERRNO | libc::EPERM as u32;
    [
        // The number of the call, the first word of `seccomp_data`.
        line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        line(libc::BPF_JMP | libc::BPF_JGE | libc::BPF_K, 0, 1, X32),
        line(libc::BPF_RET | libc::BPF_K, 0, 0, refuse),
        line(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
    ]
}

fn failed(error: BackendError) -> SandboxError {
    SandboxError::Filter(FilterError::Rules(error))
}

/// The socket families of the links.
const FAMILIES: [i32; 4] = [libc::AF_UNIX, libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK];

/// The requests of `ioctl` that are used: whether a file is a terminal, flags of files and sockets,
/// the local vsock cid.
const IOCTLS: [u64; 6] = [
    libc::TCGETS,
    libc::TIOCGWINSZ,
    libc::FIONREAD,
    libc::FIONBIO,
    libc::FIOCLEX,
    0x7b9, // IOCTL_VM_SOCKETS_GET_LOCAL_CID
];

/// The requests of `prctl` that are used: names of threads, and names of memory by the C library.
const PRCTLS: [i32; 3] = [libc::PR_SET_NAME, libc::PR_GET_NAME, libc::PR_SET_VMA];

/// The requests of `fcntl` that make the kernel send signals to other processes.
const SIGNALLING: [i32; 3] = [libc::F_SETOWN, F_SETSIG, F_SETOWN_EX];
const F_SETSIG: i32 = 10; // linux/fcntl.h
const F_SETOWN_EX: i32 = 15;

/// The requests of `ioctl` that make the kernel send signals to other processes, or that type on
/// the terminal of the operator.
const SIGNALLING_IOCTLS: [u64; 4] = [
    0x8901, // FIOSETOWN of asm/sockios.h
    0x8902, // SIOCSPGRP
    libc::TIOCSTI,
    libc::TIOCLINUX,
];

/// The system calls that change how the kernel treats the process of their first argument, and that
/// may be made for the calling thread (0) or process.
///
/// `sched_setaffinity`, `sched_setscheduler`, `sched_setparam` and `sched_setattr` are not among
/// them. The C library passes the number of a thread to these calls, also for a thread that it
/// starts, drivers use them for their threads, and a filter cannot tell the threads of this process
/// from those of another. The calls change on which processors and how soon other processes of the
/// user run, and read and write nothing of them.
const OF_PROCESS: [c_long; 3] = [
    libc::SYS_prlimit64,
    libc::SYS_migrate_pages,
    libc::SYS_move_pages,
];

/// The calls of which the first argument says what the second one names, and what that is for a
/// process.
const OF_NAMED: [(c_long, u64); 2] = [
    (libc::SYS_setpriority, libc::PRIO_PROCESS as u64),
    (libc::SYS_ioprio_set, 1), // IOPRIO_WHO_PROCESS of linux/ioprio.h
];

/// The system calls that reach a process outside through a new socket. A worker makes none. A pair
/// of datagram sockets is among them: each can send to any address.
const CONNECTING: [c_long; 7] = [
    libc::SYS_socket,
    libc::SYS_socketpair,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    libc::SYS_accept,
    libc::SYS_accept4,
];

/// Those of them that the process of a virtual machine makes, which has its listeners from its
/// start.
const ACCEPTING: [c_long; 2] = [libc::SYS_accept, libc::SYS_accept4];

/// The system calls by which a supervisor starts and watches processes.
#[cfg(target_arch = "x86_64")]
const STARTING: [c_long; 6] = [
    libc::SYS_execve,
    libc::SYS_fork,
    libc::SYS_vfork,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_tkill,
];
#[cfg(not(target_arch = "x86_64"))]
const STARTING: [c_long; 4] = [
    libc::SYS_execve,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_send_signal,
    libc::SYS_tkill,
];

/// The system calls on files that only a server makes. Landlock does not restrict all of them.
const ON_FILES: [c_long; 17] = [
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_umask,
    libc::SYS_flock,
    libc::SYS_fsync,
    libc::SYS_fdatasync,
    libc::SYS_copy_file_range,
    libc::SYS_renameat,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_inotify_init1,
    libc::SYS_inotify_add_watch,
    libc::SYS_inotify_rm_watch,
];

/// The older variants of these calls.
#[cfg(target_arch = "x86_64")]
const OLDER_ON_FILES: [c_long; 7] = [
    libc::SYS_rename,
    libc::SYS_link,
    libc::SYS_unlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_chmod,
    libc::SYS_chown,
];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_ON_FILES: [c_long; 0] = [];

/// The system calls of `epoll`, which a server and the process of a virtual machine use. The kernel
/// counts what all processes of a user watch together (`/proc/sys/fs/epoll/max_user_watches`): a
/// worker watches nothing.
const WATCHING: [c_long; 4] = [
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_pwait2,
];

/// The older variant of these calls.
#[cfg(target_arch = "x86_64")]
const OLDER_WATCHING: [c_long; 1] = [libc::SYS_epoll_wait];
#[cfg(not(target_arch = "x86_64"))]
const OLDER_WATCHING: [c_long; 0] = [];

/// The system calls of an executor with the CPU engine.
fn allowed(role: Role) -> Result<Rules, SandboxError> {
    let plain = [
        // Memory.
        libc::SYS_munmap,
        libc::SYS_mremap,
        libc::SYS_madvise,
        libc::SYS_brk,
        libc::SYS_memfd_create,
        libc::SYS_mlock,
        libc::SYS_munlock,
        libc::SYS_mincore,
        libc::SYS_msync,
        libc::SYS_membarrier,
        libc::SYS_mbind, // NUMA placement
        // Threads and signals. The rule for `clone` is below.
        libc::SYS_clone3, // answered by the other filter
        libc::SYS_exit,
        libc::SYS_exit_group,
        libc::SYS_futex,
        libc::SYS_set_robust_list,
        libc::SYS_rseq,
        libc::SYS_set_tid_address,
        libc::SYS_gettid,
        libc::SYS_getpid,
        libc::SYS_getppid,
        libc::SYS_sched_yield,
        libc::SYS_sched_getaffinity,
        libc::SYS_getcpu,
        libc::SYS_getpriority,
        libc::SYS_restart_syscall,
        libc::SYS_rt_sigaction,
        libc::SYS_rt_sigprocmask,
        libc::SYS_rt_sigreturn,
        libc::SYS_rt_sigtimedwait,
        libc::SYS_sigaltstack,
        // Time.
        libc::SYS_nanosleep,
        libc::SYS_clock_nanosleep,
        libc::SYS_clock_gettime,
        libc::SYS_clock_getres,
        libc::SYS_gettimeofday,
        libc::SYS_timerfd_create,
        libc::SYS_timerfd_settime,
        libc::SYS_timerfd_gettime,
        // Files.
        libc::SYS_openat,
        libc::SYS_read,
        libc::SYS_write,
        libc::SYS_readv,
        libc::SYS_writev,
        libc::SYS_pread64,
        libc::SYS_pwrite64,
        libc::SYS_close,
        libc::SYS_lseek,
        libc::SYS_fstat,
        libc::SYS_newfstatat,
        libc::SYS_statx,
        libc::SYS_statfs,
        libc::SYS_fstatfs,
        libc::SYS_faccessat,
        libc::SYS_faccessat2,
        libc::SYS_readlinkat,
        libc::SYS_getdents64,
        libc::SYS_getcwd,
        libc::SYS_ftruncate,
        libc::SYS_fallocate,
        libc::SYS_fadvise64,
        libc::SYS_dup,
        libc::SYS_dup3,
        libc::SYS_pipe2,
        // Connected sockets, and polling.
        libc::SYS_getsockname,
        libc::SYS_getpeername,
        libc::SYS_getsockopt,
        libc::SYS_setsockopt,
        libc::SYS_sendto,
        libc::SYS_recvfrom,
        libc::SYS_sendmsg,
        libc::SYS_recvmsg,
        libc::SYS_shutdown,
        libc::SYS_ppoll,
        libc::SYS_pselect6,
        libc::SYS_eventfd2,
        // Properties of the machine and of this process.
        libc::SYS_getrandom,
        libc::SYS_uname,
        libc::SYS_sysinfo,
        libc::SYS_getrusage,
        libc::SYS_times,
        libc::SYS_getuid,
        libc::SYS_geteuid,
        libc::SYS_getgid,
        libc::SYS_getegid,
        libc::SYS_getgroups,
    ];
    // Older variants, which x86-64 has.
    #[cfg(target_arch = "x86_64")]
    let older = &[
        libc::SYS_open,
        libc::SYS_stat,
        libc::SYS_lstat,
        libc::SYS_access,
        libc::SYS_readlink,
        libc::SYS_dup2,
        libc::SYS_pipe,
        libc::SYS_poll,
        libc::SYS_select,
        libc::SYS_time,
        libc::SYS_getrlimit,
        libc::SYS_alarm,
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let older = &[];
    let mut rules = always(&plain, older);

    // No executable memory: an attacker cannot bring code.
    let not_executable = vec![rule([masked(2, libc::PROT_EXEC as u64, 0)?])?];
    rules.insert(libc::SYS_mmap, not_executable.clone());
    rules.insert(libc::SYS_mprotect, not_executable);
    // Threads, no processes.
    let thread = libc::CLONE_THREAD as u64;
    rules.insert(libc::SYS_clone, vec![rule([masked(0, thread, thread)?])?]);
    // Signals to this process, such as those of `abort`.
    let own = equals(0, u64::from(std::process::id()))?;
    rules.insert(libc::SYS_tgkill, vec![rule([own])?]);
    // Resource limits of this process can be read: no new limit, which is a pointer.
    rules.insert(libc::SYS_prlimit64, vec![rule([equals(0, 0)?, null(2)?])?]);
    // The processors of the calling thread.
    rules.insert(libc::SYS_sched_setaffinity, vec![rule([equals(0, 0)?])?]);
    // The priority of the calling thread.
    let which = libc::PRIO_PROCESS as u64;
    rules.insert(
        libc::SYS_setpriority,
        vec![rule([equals(0, which)?, equals(1, 0)?])?],
    );
    let one_of = |values: &[u64], argument| {
        values
            .iter()
            .map(|&value| rule([equals(argument, value)?]))
            .collect::<Result<Vec<_>, _>>()
    };
    let no_signal = SIGNALLING.map(|request| condition(1, SeccompCmpOp::Ne, request as u64));
    let no_signal = no_signal.into_iter().collect::<Result<Vec<_>, _>>()?;
    let no_signal = SeccompRule::new(no_signal).map_err(failed)?;
    rules.insert(libc::SYS_fcntl, vec![no_signal]);
    rules.insert(libc::SYS_ioctl, one_of(&IOCTLS, 1)?);
    rules.insert(
        libc::SYS_prctl,
        one_of(&PRCTLS.map(|option| option as u64), 0)?,
    );
    if role == Role::Machine {
        rules.extend(always(&ACCEPTING, &[]));
    }
    if matches!(role, Role::Server | Role::Machine) {
        rules.extend(always(&WATCHING, &OLDER_WATCHING));
    }
    if role == Role::Server {
        rules.extend(always(&ON_FILES, &OLDER_ON_FILES));
        rules.extend(always(&CONNECTING, &[]));
        let families = FAMILIES.map(|family| family as u64);
        rules.insert(libc::SYS_socket, one_of(&families, 0)?);
        rules.insert(libc::SYS_socketpair, one_of(&families[..1], 0)?);
    }
    Ok(rules)
}

/// The system calls that affect something outside this process, and that no driver uses once it is
/// loaded.
fn refused(role: Role) -> Result<Rules, SandboxError> {
    let plain = [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_process_vm_readv,
        libc::SYS_process_vm_writev,
        libc::SYS_pidfd_getfd,
        libc::SYS_pidfd_open,
        libc::SYS_pidfd_send_signal,
        libc::SYS_process_madvise,
        libc::SYS_process_mrelease,
        libc::SYS_tkill,
        libc::SYS_rt_sigqueueinfo,
        libc::SYS_rt_tgsigqueueinfo,
        libc::SYS_kcmp,
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_chroot,
        libc::SYS_move_mount,
        libc::SYS_open_tree,
        libc::SYS_fsopen,
        libc::SYS_fsmount,
        libc::SYS_fsconfig,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_bpf,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
        libc::SYS_keyctl,
        libc::SYS_add_key,
        libc::SYS_request_key,
        libc::SYS_kexec_load,
        libc::SYS_kexec_file_load,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_delete_module,
        libc::SYS_reboot,
        libc::SYS_swapon,
        libc::SYS_swapoff,
        libc::SYS_acct,
        libc::SYS_quotactl,
        libc::SYS_settimeofday,
        libc::SYS_clock_settime,
        libc::SYS_clock_adjtime,
        libc::SYS_adjtimex,
        libc::SYS_setuid,
        libc::SYS_setgid,
        libc::SYS_setreuid,
        libc::SYS_setregid,
        libc::SYS_setresuid,
        libc::SYS_setresgid,
        libc::SYS_setgroups,
        libc::SYS_capset,
        libc::SYS_open_by_handle_at,
        libc::SYS_personality,
        libc::SYS_syslog,
        libc::SYS_sethostname,
        libc::SYS_setdomainname,
        libc::SYS_fanotify_init,
        // Shared memory, queues and semaphores of System V, and POSIX queues: all processes of the
        // user have the same ones, and Landlock does not restrict them.
        libc::SYS_shmget,
        libc::SYS_shmat,
        libc::SYS_shmdt,
        libc::SYS_shmctl,
        libc::SYS_msgget,
        libc::SYS_msgsnd,
        libc::SYS_msgrcv,
        libc::SYS_msgctl,
        libc::SYS_semget,
        libc::SYS_semop,
        libc::SYS_semtimedop,
        libc::SYS_semctl,
        libc::SYS_mq_open,
        libc::SYS_mq_unlink,
    ];
    #[cfg(target_arch = "x86_64")]
    let older = &[
        libc::SYS_fork,
        libc::SYS_vfork,
        libc::SYS_iopl,
        libc::SYS_ioperm,
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let older = &[];
    let mut rules = always(&plain, older);
    if role == Role::Supervisor {
        // A supervisor starts processes, which inherit these rules, and ends them.
        for call in STARTING {
            rules.remove(&call);
        }
        return Ok(rules);
    }
    rules.insert(
        libc::SYS_clone,
        vec![rule([masked(0, libc::CLONE_THREAD as u64, 0)?])?],
    );
    // Signals to other processes.
    let other = condition(0, SeccompCmpOp::Ne, u64::from(std::process::id()))?;
    for call in [libc::SYS_kill, libc::SYS_tgkill] {
        rules.insert(call, vec![rule([other.clone()])?]);
    }
    refuse_for_others(&mut rules)?;
    let other_families = FAMILIES
        .into_iter()
        .map(|family| condition(0, SeccompCmpOp::Ne, family as u64))
        .collect::<Result<Vec<_>, _>>()?;
    rules.insert(
        libc::SYS_socket,
        vec![SeccompRule::new(other_families).map_err(failed)?],
    );
    let signalling = SIGNALLING.map(|request| rule([equals(1, request as u64)?]));
    let signalling = signalling.into_iter().collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_fcntl, signalling);
    if role == Role::Worker {
        for call in CONNECTING {
            rules.insert(call, Vec::new());
        }
    }
    if role == Role::Machine {
        for call in CONNECTING {
            if !ACCEPTING.contains(&call) {
                rules.insert(call, Vec::new());
            }
        }
    }
    Ok(rules)
}

/// Refuses the calls of [`OF_PROCESS`] and [`OF_NAMED`] for other processes, and those of `ioctl`
/// that signal to them.
fn refuse_for_others(rules: &mut Rules) -> Result<(), SandboxError> {
    let is_other = |argument| {
        let not = |pid| condition(argument, SeccompCmpOp::Ne, pid);
        rule([not(0)?, not(u64::from(std::process::id()))?])
    };
    for call in OF_PROCESS {
        rules.insert(call, vec![is_other(0)?]);
    }
    for (call, process) in OF_NAMED {
        let of_many = rule([condition(0, SeccompCmpOp::Ne, process)?])?;
        rules.insert(call, vec![of_many, is_other(1)?]);
    }
    let signalling = SIGNALLING_IOCTLS.map(|request| rule([equals(1, request)?]));
    let signalling = signalling.into_iter().collect::<Result<Vec<_>, _>>()?;
    rules.insert(libc::SYS_ioctl, signalling);
    Ok(())
}

/// Rules that match these calls with any arguments.
fn always(calls: &[c_long], older: &[c_long]) -> Rules {
    let calls = calls.iter().chain(older);
    calls.map(|&call| (call, Vec::new())).collect()
}

fn rule<const N: usize>(conditions: [SeccompCondition; N]) -> Result<SeccompRule, SandboxError> {
    SeccompRule::new(conditions.to_vec()).map_err(failed)
}

/// A condition on an argument of which the kernel reads 32 bits.
fn condition(
    argument: u8,
    how: SeccompCmpOp,
    value: u64,
) -> Result<SeccompCondition, SandboxError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, how, value).map_err(failed)
}

fn equals(argument: u8, value: u64) -> Result<SeccompCondition, SandboxError> {
    condition(argument, SeccompCmpOp::Eq, value)
}

/// A pointer argument that is null, in all of its bits.
fn null(argument: u8) -> Result<SeccompCondition, SandboxError> {
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, SeccompCmpOp::Eq, 0).map_err(failed)
}

/// A condition on some bits of an argument that is as long as a pointer.
fn masked(argument: u8, mask: u64, value: u64) -> Result<SeccompCondition, SandboxError> {
    let how = SeccompCmpOp::MaskedEq(mask);
    SeccompCondition::new(argument, SeccompCmpArgLen::Qword, how, value).map_err(failed)
}
