//! The sandbox: guests can be served in it, and all other system calls fail.

#[path = "../../tests/common/mod.rs"]
mod common;
mod served;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Host, TIMEOUT, compute, cpu};
use rustix::process::{Pid, Signal};
use served::program::copy_program;
use served::{Scratch, Serve};
use vgpu_executor::sandbox::{self, FileIsolation, ProcessIsolation, Profile, Role, SandboxError};
use vgpu_executor::service;
use vgpu_transport::link::{credentials, scm_rights};

/// Set in the process that enters the sandbox: a test runs itself again, since a process cannot
/// leave the sandbox.
const INSIDE: &str = "VGPU_TEST_SANDBOX";

/// The variable with the folder of the files that a worker is to reach no longer.
const FOLDER: &str = "VGPU_TEST_FOLDER";

/// Runs `test` of this file again, in a sandboxed process.
fn run_inside(test: &str, profile: &str) {
    run_with_folder(test, profile, Path::new(""));
}

/// As [`run_inside`], with a folder for [`FOLDER`].
fn run_with_folder(test: &str, profile: &str, folder: &Path) {
    run_command(test, profile, |command| command.env(FOLDER, folder));
}

/// As [`run_inside`], with what `prepare` adds to the command.
fn run_command(test: &str, profile: &str, prepare: impl Fn(&mut Command) -> &mut Command) {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .args(["--exact", test, "--nocapture", "--test-threads", "1"])
        .env(INSIDE, profile);
    let output = prepare(&mut command).output().expect("it starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{profile}: {text}");
    assert!(text.contains("1 passed"), "nothing was run: {text}");
}

/// Makes a system call by its number, with numbers as arguments.
fn call(number: libc::c_long, arguments: [u64; 3]) -> io::Result<i64> {
    // SAFETY: the calls below get null pointers, others that point to no page, numbers, or a page
    // that nothing else uses. If a call were allowed, its effect would be limited to this process,
    // which exists for this test only, and to a child, which ends below.
    let result = unsafe { libc::syscall(number, arguments[0], arguments[1], arguments[2]) };
    #[cfg(target_arch = "x86_64")]
    let starts_a_process = [libc::SYS_clone, libc::SYS_fork, libc::SYS_vfork].contains(&number);
    #[cfg(not(target_arch = "x86_64"))]
    let starts_a_process = number == libc::SYS_clone;
    if result == 0 && starts_a_process {
        // SAFETY: this is the child, which nothing waits for.
        unsafe { libc::_exit(0) };
    }
    if result < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(result)
    }
}

fn assert_refused(what: &str, outcome: io::Result<i64>) {
    let error = outcome.expect_err(what);
    assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{what}: {error}");
}

#[test]
fn forbidden_calls_fail_and_guests_are_served() {
    let profile = match std::env::var(INSIDE).as_deref() {
        Err(_) => {
            run_inside("forbidden_calls_fail_and_guests_are_served", "cpu");
            run_inside("forbidden_calls_fail_and_guests_are_served", "driver");
            return;
        }
        Ok("cpu") => Profile::Cpu,
        Ok(_) => Profile::Driver,
    };
    // A server with guests before and after entering, so that threads of both kinds exist.
    let host = Host::new(cpu());
    let mut before = host.guest();
    compute(&mut before);
    let sandbox = sandbox::enter(profile, Role::Server).expect("a sandbox");
    println!("{sandbox}");

    assert_refused("execve", call(libc::SYS_execve, [0, 0, 0]));
    assert!(
        Command::new("/bin/true").spawn().is_err(),
        "a program was started"
    );
    assert_refused(
        "ptrace",
        call(libc::SYS_ptrace, [libc::PTRACE_TRACEME as u64, 0, 0]),
    );
    assert_refused(
        "process_vm_readv",
        call(libc::SYS_process_vm_readv, [1, 0, 0]),
    );
    assert_refused("mount", call(libc::SYS_mount, [0, 0, 0]));
    assert_refused(
        "unshare",
        call(libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0]),
    );
    assert_refused("bpf", call(libc::SYS_bpf, [0, 0, 0]));
    assert_refused("io_uring", call(libc::SYS_io_uring_setup, [1, 0, 0]));
    assert_refused("setuid", call(libc::SYS_setuid, [0, 0, 0]));
    for family in [libc::AF_NETLINK, libc::AF_PACKET, libc::AF_ALG] {
        let raw = libc::SOCK_RAW as u64;
        assert_refused("a socket", call(libc::SYS_socket, [family as u64, raw, 0]));
    }
    // The same calls by the numbers of the x32 ABI.
    #[cfg(target_arch = "x86_64")]
    for (what, number) in [("execve", 520), ("ptrace", 521), ("getpid", 39)] {
        assert_refused(what, call(0x4000_0000 + number, [0, 0, 0]));
    }
    assert_others_are_out_of_reach(profile);
    // A new process: SIGCHLD is the only flag.
    assert_refused("clone", call(libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]));
    if profile == Profile::Cpu {
        // SAFETY: a new anonymous mapping at an address that the kernel chooses.
        let code = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                4096,
                libc::PROT_READ | libc::PROT_WRITE | libc::PROT_EXEC,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_eq!(code, libc::MAP_FAILED, "memory for code");
        assert_refused(
            "kill",
            call(libc::SYS_kill, [u64::from(std::process::id()), 0, 0]),
        );
        // A pointer whose low half is zero is not null.
        let limit = u64::from(libc::RLIMIT_NOFILE);
        assert_refused("prlimit", call(libc::SYS_prlimit64, [0, limit, 1 << 32]));
        let parent = u64::from(std::os::unix::process::parent_id());
        for (what, number) in [
            ("sched_setaffinity", libc::SYS_sched_setaffinity),
            ("sched_setscheduler", libc::SYS_sched_setscheduler),
            ("sched_setparam", libc::SYS_sched_setparam),
            ("sched_setattr", libc::SYS_sched_setattr),
        ] {
            assert_refused(what, call(number, [parent, 0, 0]));
        }
    }
    // The calls were made in this thread; the filter applies to all threads.
    std::thread::spawn(|| assert_refused("in a new thread", call(libc::SYS_execve, [0, 0, 0])))
        .join()
        .expect("a thread");

    compute(&mut before);
    compute(&mut host.guest());
    assert_all_threads_sandboxed(std::process::id());
}

/// No system call changes how the kernel treats another process of the user. A driver may make some
/// of them for its own threads.
fn assert_others_are_out_of_reach(profile: Profile) {
    let parent = u64::from(std::os::unix::process::parent_id());
    // The kernel reads 32 bits of the number of a process.
    let with_more_bits = parent | 1 << 32;
    let limit = u64::from(libc::RLIMIT_NOFILE);
    for (what, number, arguments) in [
        ("prlimit64", libc::SYS_prlimit64, [parent, limit, 0]),
        ("prlimit64", libc::SYS_prlimit64, [with_more_bits, limit, 0]),
        ("setpriority", libc::SYS_setpriority, [0, parent, 5]),
        ("setpriority of a group", libc::SYS_setpriority, [1, 0, 5]),
        ("setpriority of a user", libc::SYS_setpriority, [2, 0, 5]),
        ("ioprio_set", libc::SYS_ioprio_set, [1, parent, 3 << 13]),
        ("ioprio_set of a group", libc::SYS_ioprio_set, [2, 0, 0]),
        ("ioprio_set of a user", libc::SYS_ioprio_set, [3, 0, 0]),
        ("migrate_pages", libc::SYS_migrate_pages, [parent, 0, 0]),
        ("move_pages", libc::SYS_move_pages, [parent, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [parent, parent, 1]),
        ("pidfd_open", libc::SYS_pidfd_open, [parent, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [0, 0, 0]),
        ("process_madvise", libc::SYS_process_madvise, [0, 0, 0]),
        ("kill", libc::SYS_kill, [parent, 0, 0]),
    ] {
        assert_refused(what, call(number, arguments));
    }
    // Signals to another process, whenever a file can be read.
    for request in [libc::F_SETOWN, 10, 15] {
        let arguments = [0, request as u64, parent];
        assert_refused("fcntl for signals", call(libc::SYS_fcntl, arguments));
    }
    let requests = [0x8901, 0x8902, libc::TIOCSTI, libc::TIOCLINUX];
    for request in requests.into_iter().chain([0x8901 | 1 << 32]) {
        let arguments = [0, request, 0];
        assert_refused("ioctl for signals", call(libc::SYS_ioctl, arguments));
    }
    if profile == Profile::Cpu {
        return;
    }
    let this = u64::from(std::process::id());
    for pid in [0, this] {
        for (what, number, arguments) in [
            ("setpriority", libc::SYS_setpriority, [0, pid, 5]),
            ("ioprio_set", libc::SYS_ioprio_set, [1, pid, 2 << 13 | 7]),
            // Arguments that the kernel refuses after the filter.
            (
                "sched_setscheduler",
                libc::SYS_sched_setscheduler,
                [pid, 0, 0],
            ),
            ("sched_setparam", libc::SYS_sched_setparam, [pid, 0, 0]),
            ("sched_setattr", libc::SYS_sched_setattr, [pid, 0, 0]),
            (
                "sched_setaffinity",
                libc::SYS_sched_setaffinity,
                [pid, 8, 0],
            ),
        ] {
            let code = call(number, arguments)
                .err()
                .and_then(|error| error.raw_os_error());
            assert_ne!(code, Some(libc::EPERM), "{what} of {pid}");
        }
    }
    rustix::process::setrlimit(
        rustix::process::Resource::Core,
        rustix::process::getrlimit(rustix::process::Resource::Core),
    )
    .expect("limits of this process");
}

/// -1, of 32 bits.
const NONE: u64 = 0xffff_ffff;

/// A key of System V that nobody uses.
const KEY: u64 = 0x7667_7075;

/// For `fanotify_init`: needs no capability.
const FAN_REPORT_FID: u64 = 0x200; // linux/fanotify.h

/// Makes the kernel answer ENOSYS to these system calls of this thread and its later threads,
/// unless another filter refuses them: that of the sandbox answers EPERM. So a call that the kernel
/// would refuse without a filter, too, for want of a capability, shows what the filter does.
fn answer_with_enosys(calls: &[libc::c_long]) {
    let line = |code: u32, jt, jf, k| libc::sock_filter {
        code: code as u16,
        jt,
        jf,
        k,
    };
    // The number of the call, the first word of `seccomp_data`.
    let mut program = vec![line(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0)];
    for number in calls {
        let number = u32::try_from(*number).expect("a number");
        program.push(line(
            libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K,
            0,
            1,
            number,
        ));
        // Of a process that nobody traces, the kernel answers ENOSYS (seccomp(2)).
        program.push(line(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_TRACE,
        ));
    }
    program.push(line(
        libc::BPF_RET | libc::BPF_K,
        0,
        0,
        libc::SECCOMP_RET_ALLOW,
    ));
    let program = libc::sock_fprog {
        len: u16::try_from(program.len()).expect("a short program"),
        filter: program.as_mut_ptr(),
    };
    // SAFETY: both calls take numbers, and the second one a pointer to a program, which the kernel
    // copies. The program and its lines outlive the call.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        let mode = libc::SECCOMP_MODE_FILTER;
        let outcome = libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program);
        assert_eq!(outcome, 0, "{}", io::Error::last_os_error());
    }
}

/// The system calls by which a process could leave its limits, with arguments. Without the filter
/// most of them fail with another code than EPERM, or have no effect. Some need capabilities, and
/// would fail with EPERM anyway, whatever the arguments are.
fn escapes() -> Vec<(&'static str, libc::c_long, [u64; 3])> {
    let parent = u64::from(std::os::unix::process::parent_id());
    let mut all = vec![
        // Programs.
        ("execveat", libc::SYS_execveat, [0, 0, 0]),
        // Other processes.
        (
            "ptrace",
            libc::SYS_ptrace,
            [u64::from(libc::PTRACE_TRACEME), 0, 0],
        ),
        (
            "process_vm_readv",
            libc::SYS_process_vm_readv,
            [parent, 0, 0],
        ),
        (
            "process_vm_writev",
            libc::SYS_process_vm_writev,
            [parent, 0, 0],
        ),
        ("process_madvise", libc::SYS_process_madvise, [0, 0, 0]),
        ("process_mrelease", libc::SYS_process_mrelease, [0, 0, 0]),
        ("pidfd_getfd", libc::SYS_pidfd_getfd, [0, 0, 0]),
        ("kcmp", libc::SYS_kcmp, [parent, parent, 1]),
        ("rt_sigqueueinfo", libc::SYS_rt_sigqueueinfo, [parent, 0, 0]),
        (
            "rt_tgsigqueueinfo",
            libc::SYS_rt_tgsigqueueinfo,
            [parent, parent, 0],
        ),
        ("perf_event_open", libc::SYS_perf_event_open, [0, 0, 0]),
        ("userfaultfd", libc::SYS_userfaultfd, [1, 0, 0]), // UFFD_USER_MODE_ONLY
        // Namespaces and file systems.
        ("setns", libc::SYS_setns, [0, 0, 0]),
        ("unshare", libc::SYS_unshare, [0, 0, 0]),
        ("mount", libc::SYS_mount, [0, 0, 0]),
        ("umount2", libc::SYS_umount2, [0, 0, 0]),
        ("chroot", libc::SYS_chroot, [0, 0, 0]),
        ("pivot_root", libc::SYS_pivot_root, [0, 0, 0]),
        ("fsopen", libc::SYS_fsopen, [0, 0, 0]),
        ("fsmount", libc::SYS_fsmount, [0, 0, 0]),
        ("fsconfig", libc::SYS_fsconfig, [0, 0, 0]),
        ("fspick", libc::SYS_fspick, [0, 0, 0]),
        ("move_mount", libc::SYS_move_mount, [0, 0, 0]),
        ("open_tree", libc::SYS_open_tree, [0, 0, 0]),
        ("mount_setattr", libc::SYS_mount_setattr, [0, 0, 0]),
        ("open_by_handle_at", libc::SYS_open_by_handle_at, [0, 0, 0]),
        // The kernel.
        ("bpf", libc::SYS_bpf, [0, 0, 0]),
        ("io_uring_setup", libc::SYS_io_uring_setup, [1, 0, 0]),
        ("io_uring_enter", libc::SYS_io_uring_enter, [0, 0, 0]),
        ("io_uring_register", libc::SYS_io_uring_register, [0, 0, 0]),
        ("keyctl", libc::SYS_keyctl, [0, 0, 0]),
        ("add_key", libc::SYS_add_key, [0, 0, 0]),
        ("request_key", libc::SYS_request_key, [0, 0, 0]),
        ("kexec_load", libc::SYS_kexec_load, [0, 0, 0]),
        ("kexec_file_load", libc::SYS_kexec_file_load, [0, 0, 0]),
        ("init_module", libc::SYS_init_module, [0, 0, 0]),
        ("finit_module", libc::SYS_finit_module, [0, 0, 0]),
        ("delete_module", libc::SYS_delete_module, [0, 0, 0]),
        // Rights.
        ("personality", libc::SYS_personality, [0xffff_ffff, 0, 0]),
        ("capset", libc::SYS_capset, [0, 0, 0]),
        ("setuid", libc::SYS_setuid, [0, 0, 0]),
        ("setgid", libc::SYS_setgid, [0, 0, 0]),
        ("setgroups", libc::SYS_setgroups, [0, 0, 0]),
        // Nothing changes: -1 is the present one.
        ("setreuid", libc::SYS_setreuid, [NONE, NONE, 0]),
        ("setregid", libc::SYS_setregid, [NONE, NONE, 0]),
        ("setresuid", libc::SYS_setresuid, [NONE, NONE, NONE]),
        ("setresgid", libc::SYS_setresgid, [NONE, NONE, NONE]),
        // The machine. The pointers are none, which the kernel finds first.
        ("settimeofday", libc::SYS_settimeofday, [1, 0, 0]),
        ("clock_settime", libc::SYS_clock_settime, [0, 1, 0]),
        ("clock_adjtime", libc::SYS_clock_adjtime, [0, 1, 0]),
        ("adjtimex", libc::SYS_adjtimex, [1, 0, 0]),
        ("quotactl", libc::SYS_quotactl, [0xff, 0, 0]),
        ("syslog", libc::SYS_syslog, [10, 0, 0]), // SYSLOG_ACTION_SIZE_BUFFER
        (
            "fanotify_init",
            libc::SYS_fanotify_init,
            [FAN_REPORT_FID, 0, 0],
        ),
        ("reboot", libc::SYS_reboot, [0, 0, 0]),
        ("swapon", libc::SYS_swapon, [0, 0, 0]),
        ("swapoff", libc::SYS_swapoff, [0, 0, 0]),
        ("acct", libc::SYS_acct, [1, 0, 0]),
        ("sethostname", libc::SYS_sethostname, [0, NONE, 0]),
        ("setdomainname", libc::SYS_setdomainname, [0, NONE, 0]),
        // What all processes of the user have in common. There are no such keys and numbers.
        ("shmget", libc::SYS_shmget, [KEY, 0, 0]),
        ("shmat", libc::SYS_shmat, [NONE, 0, 0]),
        ("shmdt", libc::SYS_shmdt, [1, 0, 0]),
        ("shmctl", libc::SYS_shmctl, [NONE, 2, 0]), // IPC_STAT
        ("msgget", libc::SYS_msgget, [KEY, 0, 0]),
        ("msgsnd", libc::SYS_msgsnd, [NONE, 0, 0]),
        ("msgrcv", libc::SYS_msgrcv, [NONE, 0, 0]),
        ("msgctl", libc::SYS_msgctl, [NONE, 2, 0]),
        ("semget", libc::SYS_semget, [KEY, 0, 0]),
        ("semop", libc::SYS_semop, [NONE, 0, 0]),
        ("semtimedop", libc::SYS_semtimedop, [NONE, 0, 0]),
        ("semctl", libc::SYS_semctl, [NONE, 0, 2]),
        ("mq_open", libc::SYS_mq_open, [1, 0, 0]),
        ("mq_unlink", libc::SYS_mq_unlink, [1, 0, 0]),
    ];
    #[cfg(target_arch = "x86_64")]
    all.extend([
        ("iopl", libc::SYS_iopl, [0, 0, 0]),
        ("ioperm", libc::SYS_ioperm, [0, 0, 0]),
    ]);
    all
}

/// The system calls that start processes and signal to them. A supervisor may make them.
fn escapes_of_all_but_a_supervisor() -> Vec<(&'static str, libc::c_long, [u64; 3])> {
    let parent = u64::from(std::os::unix::process::parent_id());
    let mut all = vec![
        ("execve", libc::SYS_execve, [0, 0, 0]),
        ("clone", libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0]),
        ("kill", libc::SYS_kill, [parent, 0, 0]),
        ("tkill", libc::SYS_tkill, [parent, 0, 0]),
        ("tgkill", libc::SYS_tgkill, [parent, parent, 0]),
        ("pidfd_open", libc::SYS_pidfd_open, [parent, 0, 0]),
        ("pidfd_send_signal", libc::SYS_pidfd_send_signal, [0, 0, 0]),
    ];
    #[cfg(target_arch = "x86_64")]
    all.extend([
        ("fork", libc::SYS_fork, [0, 0, 0]),
        ("vfork", libc::SYS_vfork, [0, 0, 0]),
    ]);
    all
}

/// The system calls that reach others through a new socket, which this role may not make.
fn connections_refused_to(role: Role) -> Vec<(&'static str, libc::c_long, [u64; 3])> {
    let (stream, datagram) = (libc::SOCK_STREAM as u64, libc::SOCK_DGRAM as u64);
    let unix = libc::AF_UNIX as u64;
    let mut all = Vec::new();
    if role == Role::Server {
        return all;
    }
    for family in [libc::AF_INET, libc::AF_INET6, libc::AF_VSOCK] {
        for kind in [stream, datagram] {
            all.push(("socket", libc::SYS_socket, [family as u64, kind, 0]));
        }
    }
    all.extend([
        ("a Unix socket", libc::SYS_socket, [unix, stream, 0]),
        ("socketpair", libc::SYS_socketpair, [unix, datagram, 0]),
        ("bind", libc::SYS_bind, [0, 0, 0]),
        ("listen", libc::SYS_listen, [0, 0, 0]),
        ("a datagram socket", libc::SYS_socket, [unix, datagram, 0]),
        ("connect", libc::SYS_connect, [0, 0, 0]),
    ]);
    if role == Role::Worker {
        all.extend([
            ("accept", libc::SYS_accept, [0, 0, 0]),
            ("accept4", libc::SYS_accept4, [0, 0, 0]),
        ]);
    }
    all
}

/// No memory becomes code, in none of the ways that bytes of a guest could.
fn assert_no_code() {
    let access = libc::PROT_READ | libc::PROT_EXEC;
    let file = vgpu_transport::memfd::sealed("vgpu-test", 4096).expect("a file in memory");
    let map = |access, flags, file| {
        // SAFETY: a new mapping at an address that the kernel chooses.
        unsafe { libc::mmap(std::ptr::null_mut(), 4096, access, flags, file, 0) }
    };
    for flags in [libc::MAP_SHARED, libc::MAP_PRIVATE] {
        let code = map(access, flags, file.as_raw_fd());
        let error = io::Error::last_os_error();
        assert_eq!(code, libc::MAP_FAILED, "a file in memory is code");
        assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
    }
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let page = map(libc::PROT_READ | libc::PROT_WRITE, anonymous, -1);
    assert_ne!(page, libc::MAP_FAILED, "a page");
    for (what, number) in [
        ("mprotect", libc::SYS_mprotect),
        ("pkey_mprotect", libc::SYS_pkey_mprotect),
    ] {
        assert_refused(what, call(number, [page as u64, 4096, access as u64]));
    }
    const READ_IMPLIES_EXEC: u64 = 0x0040_0000; // linux/personality.h
    let number = libc::SYS_personality;
    assert_refused("personality", call(number, [READ_IMPLIES_EXEC, 0, 0]));
}

#[test]
fn each_way_out_of_a_process_is_refused() {
    let test = "each_way_out_of_a_process_is_refused";
    // The processes of `vgpu serve`. The last one is the supervisor.
    let all = [Profile::Cpu, Profile::Driver]
        .into_iter()
        .flat_map(|profile| {
            [Role::Server, Role::Machine, Role::Worker].map(|role| Some((profile, role)))
        });
    let all: Vec<_> = all.chain([None]).collect();
    let Ok(process) = std::env::var(INSIDE) else {
        for process in 0..all.len() {
            run_inside(test, &process.to_string());
        }
        return;
    };
    let process: usize = process.parse().expect("a number of the list");
    let (name, mut calls) = (format!("{:?}", all[process]), escapes());
    // The sandbox itself gives up capabilities.
    let others = { calls.iter() }.filter(|(_, number, _)| *number != libc::SYS_capset);
    answer_with_enosys(&others.map(|(_, number, _)| *number).collect::<Vec<_>>());
    assert_eq!(
        call(libc::SYS_swapoff, [0, 0, 0])
            .unwrap_err()
            .raw_os_error(),
        Some(libc::ENOSYS)
    );
    match all[process] {
        None => {
            sandbox::enter_supervisor().expect("a sandbox");
        }
        Some((profile, role)) => {
            calls.extend(escapes_of_all_but_a_supervisor());
            calls.extend(connections_refused_to(role));
            if (profile, role) == (Profile::Cpu, Role::Worker) {
                calls.extend([
                    ("epoll_create1", libc::SYS_epoll_create1, [0, 0, 0]),
                    ("epoll_ctl", libc::SYS_epoll_ctl, [0, 0, 0]),
                    ("epoll_pwait", libc::SYS_epoll_pwait, [0, 0, 0]),
                    ("epoll_pwait2", libc::SYS_epoll_pwait2, [0, 0, 0]),
                ]);
                #[cfg(target_arch = "x86_64")]
                calls.push(("epoll_wait", libc::SYS_epoll_wait, [0, 0, 0]));
            }
            sandbox::enter(profile, role).expect("a sandbox");
        }
    }
    let outcomes = { calls.into_iter() }.map(|(what, number, arguments)| {
        let code = call(number, arguments)
            .err()
            .and_then(|error| error.raw_os_error());
        (what, code)
    });
    let open: Vec<_> = outcomes
        .filter(|(_, code)| *code != Some(libc::EPERM))
        .collect();
    assert!(open.is_empty(), "{name} can make {open:?}");
    let clone3 = call(libc::SYS_clone3, [0, 0, 0]).err();
    let code = clone3.and_then(|error| error.raw_os_error());
    assert_eq!(code, Some(libc::ENOSYS), "clone3 by {name}");
    if matches!(all[process], Some((Profile::Cpu, _))) {
        assert_no_code();
    }
}

/// Starts a thread like those of a driver: it handles no signal.
fn start_thread_without_signals() {
    let (sender, started) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        // SAFETY: the set is filled in before its use, and the third pointer may be null.
        unsafe {
            let mut all: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, std::ptr::null_mut());
        }
        sender.send(()).expect("the test waits");
        loop {
            std::thread::park();
        }
    });
    started.recv().expect("the thread runs");
}

#[test]
fn capabilities_are_dropped_before_a_driver_starts_threads_without_signals() {
    if !rustix::process::geteuid().is_root() {
        return; // no other user has capabilities
    }
    let test = "capabilities_are_dropped_before_a_driver_starts_threads_without_signals";
    let is_before = match std::env::var(INSIDE).as_deref() {
        Err(_) => {
            run_inside(test, "before");
            run_inside(test, "after");
            return;
        }
        Ok(when) => when == "before",
    };
    if is_before {
        assert_ne!(
            sandbox::drop_current_capabilities().expect("capabilities"),
            0
        );
    }
    start_thread_without_signals();
    let entered = sandbox::enter(Profile::Driver, Role::Server);
    match is_before {
        true => {
            entered.expect("a sandbox");
            assert_no_capabilities(std::process::id());
        }
        false => assert!(
            matches!(entered, Err(SandboxError::Stubborn { .. })),
            "{entered:?}"
        ),
    }
}

/// A message by which a process in the sandbox puts a file into the store.
const STORED: &str = "FDSTORE=1\nFDNAME=vgpu-test-bell\nFDPOLL=0\n";

/// Runs the process of a virtual machine, whose standard input is a socket to its store, as which
/// this process receives a file and one message more.
fn run_machine_below_a_store(test: &str, folder: &Path) {
    let (ours, theirs) = rustix::net::socketpair(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::SEQPACKET,
        rustix::net::SocketFlags::CLOEXEC,
        None,
    )
    .expect("a pair");
    run_command(test, "machine", |command| {
        command
            .env(FOLDER, folder)
            .env(service::FD_STORE_ON_STDIN, "1")
            .stdin(theirs.try_clone().expect("a descriptor"))
    });
    drop(theirs);
    let mut bytes = [0; 256];
    let mut receive = || {
        let got = credentials::receive(&ours, &mut bytes).expect("a message");
        let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
        (text, got.file.is_some())
    };
    assert_eq!(receive(), (STORED.to_owned(), true));
    assert_eq!(receive(), ("to an address".to_owned(), false));
    assert_eq!(receive(), (String::new(), false));
}

/// Puts a file into the store. A message to another address goes to the store, too: a pair of
/// datagram sockets would send it to that address.
fn reach_only_the_store(other: &Path) {
    let file = vgpu_transport::memfd::sealed("vgpu-test", 4096).expect("a file in memory");
    service::store("vgpu-test-bell", file.as_fd());
    let other = rustix::net::SocketAddrUnix::new(other).expect("an address");
    let sent = scm_rights::send_to(io::stdin(), &other, b"to an address", &[]);
    assert_eq!(sent, Ok(13));
}

/// Another process of this user, which is not hidden, and has no capabilities that this process has
/// not. It ends with this process.
struct OtherProcess(Child);

impl OtherProcess {
    /// Starts the process. This one gives up its capabilities before: with some of them, the kernel
    /// asks nobody else who may read another process.
    fn start() -> OtherProcess {
        sandbox::drop_current_capabilities().expect("capabilities");
        rustix::thread::set_no_new_privs(true).expect("no new privileges");
        let child = Command::new("cat").stdin(Stdio::piped()).spawn();
        OtherProcess(child.expect("it starts"))
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Checks what /proc says about the process, which the access check of ptrace(2) guards: its
    /// memory, environment, mappings, descriptors.
    fn assert(&self, is_so: fn(&io::Result<()>) -> bool) {
        let of = |what: &str| format!("/proc/{}/{what}", self.pid());
        let memory = fs::File::open(of("mem")).map(drop);
        let descriptor = fs::read_link(of("fd/0")).map(drop);
        let mut outcomes = vec![("mem", memory), ("fd", descriptor)];
        let others = ["environ", "maps", "smaps", "syscall", "auxv"];
        outcomes.extend(others.map(|what| (what, fs::read(of(what)).map(drop))));
        for (what, outcome) in outcomes {
            assert!(is_so(&outcome), "{what}: {outcome:?}");
        }
    }
}

fn is_reachable(outcome: &io::Result<()>) -> bool {
    outcome.is_ok()
}

fn is_refused(outcome: &io::Result<()>) -> bool {
    let kind = outcome.as_ref().err().map(io::Error::kind);
    kind == Some(io::ErrorKind::PermissionDenied)
}

#[test]
fn worker_reaches_no_file_socket_or_other_process() {
    let test = "worker_reaches_no_file_socket_or_other_process";
    let role = match std::env::var(INSIDE).as_deref() {
        Err(_) => {
            // Here, because the process in the sandbox cannot remove it.
            let scratch = Scratch::new("worker-files");
            fs::write(scratch.path().join("key"), "secret").expect("a file");
            let control = scratch.path().join("control.sock");
            let _listener = std::os::unix::net::UnixListener::bind(control).expect("a socket");
            let messages = scratch.path().join("messages.sock");
            let messages = UnixDatagram::bind(messages).expect("a socket");
            messages.set_nonblocking(true).expect("a socket");
            run_with_folder(test, "worker", scratch.path());
            run_machine_below_a_store(test, scratch.path());
            let sent = messages.recv(&mut [0]).expect_err("nobody may send");
            assert_eq!(sent.kind(), io::ErrorKind::WouldBlock, "{sent}");
            return;
        }
        Ok("worker") => Role::Worker,
        Ok(_) => Role::Machine,
    };
    let profile = Profile::Cpu;
    let file = || std::fs::read("/etc/passwd");
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    let (key, new_file) = (folder.join("key"), folder.join("new"));
    let change = move || fs::set_permissions(&key, fs::Permissions::from_mode(0o666));
    let to_write = new_file.clone();
    let write = move || fs::write(&to_write, "x");
    let control = folder.join("control.sock");
    assert!(UnixStream::connect(&control).is_ok(), "reachable before");
    let other = OtherProcess::start();
    other.assert(is_reachable);
    let (sent, mut received) = UnixStream::pair().expect("a pair");
    assert!(
        file().is_ok() && write().is_ok() && change().is_ok(),
        "reachable before"
    );
    fs::remove_file(&new_file).expect("a new file");

    // The harness has started this thread before: the rules hold for it and for its children.
    let isolation = sandbox::isolate_files().expect("rules");
    if isolation == FileIsolation::None {
        assert!(std::env::var_os("CI").is_none(), "{isolation}");
        println!("skipped: {isolation}");
        return;
    }
    // Threads that start now are those of a worker.
    std::thread::spawn(move || {
        let host = Host::new(cpu());
        let mut guest = host.guest();
        compute(&mut guest);
        other.assert(is_refused);
        sandbox::enter(profile, role).expect("a sandbox");
        other.assert(is_refused);
        for (what, outcome) in [
            ("a file", file().err()),
            ("a new file", write().err()),
            ("the permissions of a file", change().err()),
        ] {
            let error = outcome.unwrap_or_else(|| panic!("{what} can be reached"));
            assert_eq!(
                error.kind(),
                io::ErrorKind::PermissionDenied,
                "{what}: {error}"
            );
        }
        for family in [libc::AF_UNIX, libc::AF_INET, libc::AF_VSOCK] {
            let stream = libc::SOCK_STREAM as u64;
            assert_refused(
                "a socket",
                call(libc::SYS_socket, [family as u64, stream, 0]),
            );
        }
        let datagram = libc::SOCK_DGRAM as u64;
        assert_refused(
            "a pair of datagram sockets",
            call(libc::SYS_socketpair, [libc::AF_UNIX as u64, datagram, 0]),
        );
        assert_refused("bind", call(libc::SYS_bind, [0, 0, 0]));
        assert_refused("listen", call(libc::SYS_listen, [0, 0, 0]));
        assert!(UnixStream::connect(&control).is_err(), "the control socket");
        assert_refused("connect", call(libc::SYS_connect, [0, 0, 0]));
        let family = libc::AF_UNIX as u64;
        assert_refused("a socket", call(libc::SYS_socket, [family, datagram, 0]));
        if role == Role::Worker {
            assert_refused("accept", call(libc::SYS_accept4, [0, 0, 0]));
        } else {
            reach_only_the_store(&folder.join("messages.sock"));
        }
        // What a worker needs: the machine's memory, its open connections, and to compute.
        assert!(std::fs::read_to_string("/proc/meminfo").is_ok());
        assert!(std::fs::read_to_string("/proc/self/cgroup").is_ok());
        (&sent)
            .write_all(b"still open")
            .expect("an open connection");
        compute(&mut guest);
    })
    .join()
    .expect("the worker's thread");
    let mut text = [0; 10];
    received.read_exact(&mut text).expect("what was sent");
    assert_eq!(&text, b"still open");
}

/// A driver keeps its files, also those that it moves to another folder, its descriptors and its
/// connections, and may start processes while it is loaded. Other processes are out of reach, also
/// before system calls are filtered.
#[test]
fn process_with_a_driver_reaches_its_files_and_no_other_process() {
    let test = "process_with_a_driver_reaches_its_files_and_no_other_process";
    if std::env::var_os(INSIDE).is_none() {
        let scratch = Scratch::new("driver-domain");
        for folder in ["from", "to"] {
            fs::create_dir(scratch.path().join(folder)).expect("a folder");
        }
        return run_with_folder(test, "driver", scratch.path());
    }
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    let other = OtherProcess::start();
    let pid = other.pid();
    let signal = move || rustix::process::test_kill_process(pid);
    let make_device = move |name: &str| {
        // A file that stands for a removed one, for which no capability is needed.
        let (path, kind) = (folder.join(name), rustix::fs::FileType::CharacterDevice);
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, rustix::fs::Mode::RUSR, 0)
    };
    other.assert(is_reachable);
    assert_eq!((signal(), make_device("device")), (Ok(()), Ok(())));

    // The harness has started this thread before: the rules hold for it and for its children.
    let isolation = sandbox::isolate_processes().expect("rules");
    // Linux 6.12.
    if !sandbox::landlock_version().is_ok_and(|version| version >= 6) {
        assert!(std::env::var_os("CI").is_none(), "{isolation}");
        println!("skipped: {isolation}");
        return;
    }
    assert_eq!(isolation, ProcessIsolation::Full);
    let folder = PathBuf::from(std::env::var_os(FOLDER).expect("a folder"));
    std::thread::spawn(move || {
        let refused = |outcome: rustix::io::Result<()>, code| {
            assert_eq!(outcome, Err(code));
        };
        other.assert(is_refused);
        refused(signal(), rustix::io::Errno::PERM);
        refused(make_device("other"), rustix::io::Errno::ACCESS);
        // What a driver does when it is loaded.
        let mut child = Command::new("sleep").arg("600").spawn().expect("a child");
        let of_child = fs::read(format!("/proc/{}/environ", child.id()));
        assert!(of_child.is_ok(), "{of_child:?}");
        child.kill().expect("a signal to a child");
        child.wait().expect("a child");
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        std::net::TcpStream::connect(listener.local_addr().expect("bound")).expect("a connection");

        let host = Host::new(cpu());
        let mut guest = host.guest();
        compute(&mut guest);
        sandbox::enter(Profile::Driver, Role::Worker).expect("a sandbox");
        other.assert(is_refused);
        refused(signal(), rustix::io::Errno::PERM);
        // And later.
        let (from, to) = (folder.join("from/cache"), folder.join("to/cache"));
        fs::write(&from, "kernels").expect("a new file");
        fs::set_permissions(&from, fs::Permissions::from_mode(0o600)).expect("our file");
        fs::rename(&from, &to).expect("a file of this user");
        fs::hard_link(&to, &from).expect("a file of this user");
        assert_eq!(fs::read(&from).expect("a file"), b"kernels");
        fs::remove_file(&to).expect("a file of this user");
        fs::File::open("/dev/null").expect("a device");
        for what in ["mem", "environ", "maps", "fd/0"] {
            let path = format!("/proc/self/{what}");
            assert!(fs::symlink_metadata(&path).is_ok(), "{path}");
        }
        assert!(fs::read_link("/proc/self/fd/0").is_ok());
        compute(&mut guest);
    })
    .join()
    .expect("the worker's thread");
}

/// Checks in /proc that no thread has capabilities or can get any, and that each is filtered.
fn assert_all_threads_sandboxed(pid: u32) {
    let mut threads = 0;
    for entry in std::fs::read_dir(format!("/proc/{pid}/task")).expect("threads") {
        let path = entry.expect("a thread").path().join("status");
        let Ok(status) = std::fs::read_to_string(path) else {
            continue; // the thread has ended
        };
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            line.unwrap_or_else(|| panic!("no {name} in {status}"))
                .trim()
                .to_owned()
        };
        let name = field("Name:");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            assert!(
                field(set).bytes().all(|b| b == b'0'),
                "{name} has {set} {}",
                field(set)
            );
        }
        assert_eq!(field("NoNewPrivs:"), "1", "{name}");
        assert_eq!(field("Seccomp:"), "2", "{name}");
        threads += 1;
    }
    assert!(threads > 1, "{threads} threads");
}

#[test]
fn vgpu_serve_is_sandboxed_by_default() {
    let scratch = Scratch::new("sandboxed");
    let socket = scratch.socket();
    let serve = Serve::start(&socket, &[]);
    compute(&mut serve.guest(&socket));
    assert_all_threads_sandboxed(serve.child.id());
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(
        log.contains("sandboxed: not dumpable, no new privileges, no capabilities"),
        "{log}"
    );
    assert!(!socket.exists(), "the socket is left behind");

    let serve = Serve::start(&socket, &["--no-sandbox"]);
    compute(&mut serve.guest(&socket));
    let status =
        std::fs::read_to_string(format!("/proc/{}/status", serve.child.id())).expect("a status");
    assert!(status.contains("NoNewPrivs:\t0"), "{status}");
    serve.signal(Signal::TERM);
    let (_, log) = serve.wait();
    assert!(log.contains("no sandbox: --no-sandbox"), "{log}");
}

/// The processes of a supervisor: itself, its workers, the stores of files and the executors of
/// virtual machines.
fn processes_below(pid: u32) -> Vec<u32> {
    let mut found = vec![pid];
    let mut next = 0;
    while let Some(pid) = found.get(next).copied() {
        next += 1;
        let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
            continue; // it has ended
        };
        // A process that ends has no further threads.
        for thread in threads.flatten() {
            let path = thread.path().join("children");
            let children = fs::read_to_string(path).unwrap_or_default();
            found.extend(children.split_whitespace().map(|pid| {
                let pid: u32 = pid.parse().expect("a number");
                pid
            }));
        }
    }
    found
}

/// No process of `--isolate` can be read by another process of its user, and none has capabilities,
/// also if the supervisor was started with some.
#[test]
fn all_processes_of_isolation_are_hidden_and_have_no_capabilities() {
    let scratch = Scratch::new("hidden");
    fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755)).expect("ours");
    let socket = scratch.socket();
    let machine = format!("vm1,socket={}", scratch.path().join("vm1.sock").display());
    let isolate = ["--isolate", "--guest-memory", "20M", "--vm", &machine];
    let serve = Serve::start(&socket, &isolate);
    compute(&mut serve.guest(&socket));
    let mut guest = serve.guest(&socket);
    compute(&mut guest);
    let processes = processes_below(serve.child.id());
    // The supervisor, a worker, and those of the virtual machine: one keeps its files.
    assert!(processes.len() >= 4, "{processes:?}");
    let keeps_files = |pid: &&u32| has_argument(**pid, "fd-store");
    assert_eq!(processes.iter().filter(keeps_files).count(), 1);
    for pid in processes {
        assert_no_capabilities(pid);
    }
    serve.signal(Signal::TERM);
    let (status, log) = serve.wait();
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(
        log.contains("the supervisor is sandboxed: not dumpable"),
        "{log}"
    );
}

/// Whether an argument of a process is `text`.
fn has_argument(pid: u32, text: &str) -> bool {
    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    line.split(|&b| b == 0).any(|word| word == text.as_bytes())
}

/// Checks in /proc that no thread of a process has capabilities, and that no program that it starts
/// has some. Only the process that keeps a virtual machine's files may start one that does: the
/// executor, which sets the groups of its sockets.
fn assert_no_capabilities(pid: u32) {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return; // the process has ended
    };
    for entry in threads.flatten() {
        let path = entry.path().join("status");
        let Ok(status) = fs::read_to_string(path) else {
            continue; // the thread has ended
        };
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
            let line = status.lines().find(|line| line.starts_with(set));
            let line = line.unwrap_or_else(|| panic!("no {set} in {status}"));
            let value = line[set.len()..].trim();
            assert!(value.bytes().all(|b| b == b'0'), "{pid}: {line}");
        }
        for line in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
            let is_set = status.contains(line) || has_argument(pid, "fd-store");
            assert!(is_set, "{pid}: {status}");
        }
    }
}

/// How many seccomp filters that thread of a process has that has the fewest.
fn fewest_filters(pid: u32) -> u32 {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).expect("it runs");
    // A thread may have ended.
    let statuses = threads
        .flatten()
        .flat_map(|thread| fs::read_to_string(thread.path().join("status")));
    let counts = statuses.map(|status| {
        let mut lines = status.lines();
        let count = lines.find_map(|line| line.strip_prefix("Seccomp_filters:"));
        count.expect("Linux 5.9").trim().parse().expect("a number")
    });
    counts.min().expect("a thread")
}

/// Asks for the health of an executor, as soon as it answers.
fn ask_for_health(socket: &Path) {
    let start = Instant::now();
    let mut stream = loop {
        match UnixStream::connect(socket) {
            Ok(stream) => break stream,
            Err(error) => assert!(start.elapsed() < TIMEOUT, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(1));
    };
    let request = "GET /livez HTTP/1.1\r\nHost: vgpu\r\n\r\n";
    stream.write_all(request.as_bytes()).expect("a request");
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(&answer[..9], b"HTTP/1.1 ");
}

/// Asks the control socket for the sessions, as soon as it answers.
fn ask_for_sessions(control: &str) {
    let start = Instant::now();
    loop {
        let output = served::vgpu(&["ps", "--control", control]).output();
        let output = output.expect("it starts");
        if output.status.success() {
            return;
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(start.elapsed() < TIMEOUT, "{said}");
    }
}

/// Clients of the metrics and of the control socket who come as soon as there is a socket have
/// their first answer from a process whose threads are all in the sandbox.
#[test]
fn observers_are_answered_only_by_a_process_in_the_sandbox() {
    let program = Path::new(env!("CARGO_BIN_EXE_vgpu"));
    for isolate in [&["--isolate", "--guest-memory", "20M"][..], &[]] {
        for asks_for_metrics in [true, false] {
            let scratch = Scratch::new("early-observers");
            let metrics = scratch.path().join("metrics.sock");
            let control = scratch.path().join("control.sock").display().to_string();
            let address = format!("unix:{}", metrics.display());
            let mut more = vec!["--metrics", &address, "--control", &control];
            more.extend(isolate);
            let child = Serve::command_of(program, &scratch.socket(), &more).spawn();
            let serve = Serve {
                child: child.expect("it starts"),
                ready: String::new(),
            };
            match asks_for_metrics {
                true => ask_for_health(&metrics),
                false => ask_for_sessions(&control),
            }
            let before = fewest_filters(std::process::id());
            let filters = fewest_filters(serve.child.id());
            assert!(filters > before, "{filters} filters, {before}");
            serve.signal(Signal::TERM);
            let (status, log) = serve.wait();
            assert_eq!(status.code(), Some(0), "{log}");
        }
    }
}

/// A guest that connects as soon as there is a socket has its first answer from a process whose
/// threads are all in the sandbox.
#[test]
fn nobody_is_served_before_the_process_is_sandboxed() {
    let program = Path::new(env!("CARGO_BIN_EXE_vgpu"));
    for isolate in [&["--isolate", "--guest-memory", "20M"][..], &[]] {
        let scratch = Scratch::new("early");
        let socket = scratch.socket();
        let child = Serve::command_of(program, &socket, isolate).spawn();
        let serve = Serve {
            child: child.expect("it starts"),
            ready: String::new(),
        };
        let _guest = serve.guest_in_time(&socket);
        let processes = processes_below(serve.child.id());
        assert_eq!(processes.len(), 1 + usize::from(!isolate.is_empty()));
        // Each process has filters of its own besides those of the one that has started it.
        let mut before = fewest_filters(std::process::id());
        for pid in processes {
            let filters = fewest_filters(pid);
            assert!(filters > before, "{pid}: {filters} filters, {before}");
            before = filters;
        }
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

/// The kernel gives the files in /proc of a process that is not dumpable to root.
#[test]
fn processes_of_a_user_are_hidden_from_the_user() {
    use std::os::unix::fs::MetadataExt as _;
    const NOBODY: u32 = 65534;
    let scratch = Scratch::new("dumpable");
    let copy = scratch.path().join("vgpu");
    copy_program(&copy);
    let is_root = rustix::process::geteuid().is_root();
    let folder = scratch.path().join("sockets");
    fs::create_dir(&folder).expect("a folder");
    if is_root {
        std::os::unix::fs::chown(&folder, Some(NOBODY), Some(NOBODY)).expect("root may");
    }
    let socket = folder.join("vgpu.sock");
    let machine = format!("vm1,socket={}", folder.join("vm1.sock").display());
    let isolate = ["--isolate", "--guest-memory", "20M", "--vm", &machine];
    // With a virtual machine: the process that keeps its files, and the one that serves it.
    for (isolate, count) in [(&isolate[..], 4), (&isolate[..3], 2), (&[], 1)] {
        let mut command = Serve::command_of(&copy, &socket, isolate);
        if is_root {
            std::os::unix::process::CommandExt::uid(&mut command, NOBODY);
        }
        let serve = Serve::of(command);
        let mut guest = serve.guest(&socket);
        compute(&mut guest);
        let processes = processes_below(serve.child.id());
        assert_eq!(processes.len(), count, "{processes:?}");
        for pid in processes {
            let memory = fs::metadata(format!("/proc/{pid}/mem")).expect("it runs");
            assert_eq!(memory.uid(), 0, "its user can read the memory of {pid}");
        }
        drop(guest);
        serve.signal(Signal::TERM);
        let (status, log) = serve.wait();
        assert_eq!(status.code(), Some(0), "{log}");
    }
}

#[test]
fn doctor_says_what_the_kernel_has_for_the_sandbox() {
    let output = served::vgpu(&["doctor"]).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let lines: Vec<&str> = said.lines().filter(|l| l.contains("sandbox")).collect();
    for (name, has) in [
        ("seccomp", sandbox::seccomp_available().is_ok()),
        (
            "Landlock",
            sandbox::landlock_version().is_ok_and(|v| v >= 6),
        ),
    ] {
        let line = lines.iter().find(|line| line.contains(name));
        let line = line.unwrap_or_else(|| panic!("no {name} in {said}"));
        assert_eq!(line.trim_start().starts_with("ok"), has, "{line}");
    }
}
