//! What workers can do, and how memory is divided among them.

use anyhow::{Context as _, bail, ensure};
use tracing::{info, warn};
use vgpu_cpu::CpuEngine;
use vgpu_engine::Engine as _;
use vgpu_executor::config::{GuestSettings, Settings};
use vgpu_executor::engine::EngineKind;
use vgpu_executor::isolate::Partition;
use vgpu_executor::size::shown;
use vgpu_executor::weights::Sharing;
use vgpu_transport::wire::MAX_DEVICES;

use crate::serve::args::Args;

/// Refuses settings that need all guests in one process.
pub(super) fn check(settings: &Settings) -> anyhow::Result<()> {
    ensure!(
        !settings.threads.pin,
        "--isolate and --pin exclude each other: the processes of all guests would use the same \
         cores"
    );
    ensure!(
        settings.weights_cache.is_none(),
        "--isolate and the cache of weights exclude each other: several processes would write to \
         one folder, each with an index of its own"
    );
    ensure!(
        settings.share_weights != Sharing::All,
        "--isolate and --share-weights all exclude each other: the weights of each guest are in \
         its own process. The programs of one guest share weights with --share-weights tenant"
    );
    let known = |guest: &&GuestSettings| !guest.rule.certificates.is_empty();
    if let Some(guest) = settings.guests.iter().find(known) {
        bail!(
            "--isolate and guests with certificates exclude each other: only a worker sees the \
             certificate of guest {:?}, and the worker is chosen before; give the guest a listen \
             of its own",
            guest.rule.name
        );
    }
    let both = |guest: &&GuestSettings| guest.vm.is_some() && !guest.listen.is_empty();
    if let Some(guest) = settings.guests.iter().find(both) {
        bail!(
            "guest {:?} has a vm and a listen: with --isolate the process of a virtual machine \
             serves no other programs; configure two guests",
            guest.rule.name
        );
    }
    Ok(())
}

/// Refuses engines of which one process has the memory of the machine and another one a driver's:
/// the same parts are given to guests on each device.
pub(super) fn check_engines(engines: &[EngineKind], memory: Option<u64>) -> anyhow::Result<()> {
    let is_divided = |engine: &EngineKind| match engine {
        EngineKind::Cpu => true,
        EngineKind::Ggml(_) => memory.is_some(),
        _ => false,
    };
    let divided = engines.iter().filter(|engine| is_divided(engine)).count();
    ensure!(
        divided == 0 || divided == engines.len(),
        "--isolate divides the memory of the machine among the guests, and a driver divides that \
         of its GPU: the {} engines need both. Name engines of one kind, give --memory for the CPU \
         engine beside a CPU backend of ggml, or leave --memory out for GPUs",
        engines.len()
    );
    Ok(())
}

/// The memory of each device that is divided among the workers. `None`: the drivers of the engines
/// divide their memory.
pub(super) fn memory(settings: &Settings, engines: &[EngineKind]) -> anyhow::Result<Option<u64>> {
    let has = |which: fn(&EngineKind) -> bool| engines.iter().any(which);
    let has_cpu = has(|engine| *engine == EngineKind::Cpu);
    let has_ggml = has(|engine| matches!(engine, EngineKind::Ggml(_)));
    Ok(match settings.memory {
        Some(all) if has_cpu || has_ggml => Some(all),
        // The memory of the machine or its control group.
        None if has_cpu => {
            let engine = CpuEngine::new(1, None).context("reading the size of the memory")?;
            Some(engine.memory().total)
        }
        _ => None,
    })
}

/// Returns the bytes that the machine or its control group has left.
///
/// # Errors
/// The CPU engine cannot be made.
pub(super) fn machine_memory() -> anyhow::Result<impl Fn() -> u64 + Send + Sync + 'static> {
    let engine = CpuEngine::new(1, None).context("reading the size of the memory")?;
    Ok(move || engine.memory().free)
}

/// Whether the supervisor divides the memory of the machine among the guests: a part on another
/// engine than the CPU engine may be memory of its device.
pub(super) fn divides_machine_memory(engines: &[EngineKind]) -> bool {
    engines.iter().all(|engine| *engine == EngineKind::Cpu)
}

/// Says in the log if the parts of the guests are more than the machine or its control group has
/// left now: the guests that come last will get less than their parts.
pub(super) fn log_shortage(engines: &[EngineKind], partition: &Partition) -> anyhow::Result<()> {
    if !divides_machine_memory(engines) {
        return Ok(());
    }
    // A guest has its part on each engine.
    let left = machine_memory()?() / engines.len() as u64;
    match shortage(partition, left) {
        Some(Shortage::OfNamed(text)) => warn!("{text}"),
        Some(Shortage::OfAll(text)) => info!("{text}"),
        None => {}
    }
    Ok(())
}

/// The parts of the guests are more than the machine has left.
#[derive(Debug, PartialEq, Eq)]
enum Shortage {
    /// Those of the named guests alone.
    OfNamed(String),
    /// Those of the named guests and of as many unnamed guests as are accepted.
    OfAll(String),
}

/// `left`: the bytes that the machine has left.
fn shortage(partition: &Partition, left: u64) -> Option<Shortage> {
    let parts = { partition.rules.guests.iter() }.filter_map(|rule| rule.policy.memory);
    let named = parts.fold(0, u64::saturating_add);
    let each = partition
        .rules
        .unnamed
        .as_ref()
        .and_then(|unnamed| unnamed.memory);
    let places = u64::try_from(partition.max_unnamed).unwrap_or(u64::MAX);
    let all = named.saturating_add(each.unwrap_or(0).saturating_mul(places));
    let text = |who: &str, sum| {
        format!(
            "the parts of {who} are {} in all, and the machine has {} left now: guests that come \
             when the memory is given away get less than their parts",
            shown(sum),
            shown(left)
        )
    };
    if named > left {
        Some(Shortage::OfNamed(text("the named guests", named)))
    } else if all > left {
        let who = format!("the named guests and of {places} unnamed ones");
        Some(Shortage::OfAll(text(&who, all)))
    } else {
        None
    }
}

/// A guest's part of the memory.
pub(super) fn part(args: &Args, guest: &GuestSettings) -> Option<u64> {
    guest.rule.policy.memory.or(args.guest_memory)
}

/// The least host memory of a process by default: enough for the plans of a large model.
const LEAST_HOST_MEMORY: u64 = 256 << 20;

/// The part of a process of `engine.host-memory`: each process counts what its guest takes. If this
/// is not set, a part of `all` bytes, but at least [`LEAST_HOST_MEMORY`].
pub(super) fn host_memory_of_a_process(settings: &Settings, all: u64) -> u64 {
    let machines = settings.guests.iter().filter(|guest| guest.vm.is_some());
    let processes = settings.max_guests.saturating_add(machines.count()).max(1);
    let part = |bytes: u64| bytes / processes as u64;
    match settings.host_memory {
        Some(bytes) => part(bytes),
        None => part(all).max(LEAST_HOST_MEMORY).min(all),
    }
}

/// How many processes the unnamed guests of one origin may have, of `max_unnamed`. Without memory
/// that is divided, a process takes nothing from others by default but its place: the limit is that
/// of the programs of one guest.
fn unnamed_programs(settings: &Settings, max_unnamed: usize, is_memory_divided: bool) -> usize {
    /// A user of a small machine can still start some programs.
    const LEAST: usize = 4;
    let usual = match is_memory_divided {
        true => (max_unnamed / 4).max(LEAST),
        false => max_unnamed - max_unnamed / 4,
    };
    settings.unnamed_programs.unwrap_or(usual)
}

/// Divides `memory` bytes among the guests.
pub(super) fn partition(
    args: &Args,
    settings: &Settings,
    memory: Option<u64>,
) -> anyhow::Result<Partition> {
    let mut rules = settings.rules();
    let Some(all) = memory else {
        // With `auto`, one command serves hosts with and without a GPU.
        ensure!(
            args.guest_memory.is_none() || settings.engines.kinds() == [EngineKind::Auto],
            "--guest-memory is for the cpu engine; the driver of a GPU divides its memory"
        );
        return Ok(Partition {
            rules,
            max_unnamed: settings.max_guests,
            unnamed_programs: unnamed_programs(settings, settings.max_guests, false),
            max_sessions: settings.max_guests,
        });
    };
    const NEEDED: &str =
        "--isolate needs --guest-memory, such as --guest-memory 4G: processes cannot share memory";
    ensure!(args.guest_memory != Some(0), NEEDED);
    for (rule, guest) in rules.guests.iter_mut().zip(&settings.guests) {
        let part = part(args, guest)
            .with_context(|| format!("{NEEDED}. Guest {:?} has no memory setting", rule.name))?;
        rule.policy.memory = Some(part);
    }
    // On the device where it is most.
    let promised = (0..MAX_DEVICES as usize).map(|device| {
        let parts = rules.guests.iter().map(|rule| rule.policy.quota_on(device));
        parts.fold(0, u64::saturating_add)
    });
    let promised = promised.max().unwrap_or(0);
    ensure!(
        settings.overcommit || promised <= all,
        "the named guests have {} of memory in all, {} are available: make their parts smaller, or \
         set overcommit = true",
        shown(promised),
        shown(all)
    );
    let mut max_unnamed = 0;
    if let Some(unnamed) = &mut rules.unnamed {
        let each = unnamed.memory.or(args.guest_memory).context(NEEDED)?;
        unnamed.memory = Some(each);
        let left = all.saturating_sub(if settings.overcommit { 0 } else { promised });
        max_unnamed = usize::try_from(left / each.max(1)).unwrap_or(usize::MAX);
        max_unnamed = max_unnamed.min(settings.max_guests);
        ensure!(
            max_unnamed > 0 || !rules.guests.is_empty(),
            "{} of memory are not enough for one guest with {} (--guest-memory); make it smaller",
            shown(all),
            shown(each)
        );
    }
    Ok(Partition {
        rules,
        max_unnamed,
        unnamed_programs: unnamed_programs(settings, max_unnamed, true),
        max_sessions: settings.max_guests,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 MiB in all: 40 for a named guest, and 20 for each other one.
    fn divided(overcommit: bool, named: u64) -> anyhow::Result<Partition> {
        let mut args = Args::default();
        args.guest_memory = Some(20 << 20);
        let mut guest = GuestSettings::new("alice");
        guest.rule.policy.memory = Some(named << 20);
        let settings = Settings {
            guests: vec![guest],
            overcommit,
            ..Settings::default()
        };
        partition(&args, &settings, Some(100 << 20))
    }

    #[test]
    fn memory_is_divided_or_left_to_drivers() {
        let vulkan: EngineKind = "ggml:/a.so:V0".parse().unwrap();
        let (cuda, cpu) = (EngineKind::Cuda(0), EngineKind::Cpu);
        let memory = Some(1 << 30);
        for (engines, memory, is_allowed) in [
            (vec![cuda.clone(), EngineKind::Cuda(1)], None, true),
            (vec![cuda.clone(), vulkan.clone()], None, true),
            (vec![cuda.clone(), vulkan.clone()], memory, false),
            (vec![cpu.clone(), vulkan], memory, true),
            (vec![cuda, cpu], None, false),
        ] {
            let checked = check_engines(&engines, memory);
            assert_eq!(checked.is_ok(), is_allowed, "{engines:?}");
        }
    }

    #[test]
    fn a_process_has_enough_host_memory_by_default() {
        let mut settings = Settings::default();
        assert_eq!(host_memory_of_a_process(&settings, 4 << 30), 256 << 20);
        assert_eq!(host_memory_of_a_process(&settings, 128 << 30), 2 << 30);
        assert_eq!(host_memory_of_a_process(&settings, 100 << 20), 100 << 20);
        settings.max_guests = 1;
        assert_eq!(host_memory_of_a_process(&settings, 4 << 30), 4 << 30);
        let mut machine = GuestSettings::new("vm1");
        machine.vm = Some("vm1,socket=/run/vm1.sock".parse().unwrap());
        settings.guests.push(machine);
        assert_eq!(host_memory_of_a_process(&settings, 4 << 30), 2 << 30);
        // A size that somebody has set is divided as it is.
        settings.host_memory = Some(64 << 20);
        assert_eq!(host_memory_of_a_process(&settings, 4 << 30), 32 << 20);
    }

    #[test]
    fn one_origin_has_a_quarter_of_the_parts_or_its_share_of_the_places() {
        let programs = |memory: Option<u64>| {
            let mut args = Args::default();
            args.guest_memory = memory.map(|_| 1 << 20);
            let partition = partition(&args, &Settings::default(), memory).unwrap();
            partition.unnamed_programs
        };
        assert_eq!(programs(Some(64 << 20)), 16);
        assert_eq!(programs(Some(6 << 20)), 4, "at least four");
        assert_eq!(programs(None), 48);
    }

    #[test]
    fn parts_of_all_guests_are_no_more_than_the_memory() {
        let parts = divided(false, 40).unwrap();
        assert_eq!(parts.max_unnamed, 3);
        assert_eq!(shortage(&parts, 100 << 20), None);
        let error = divided(false, 101).unwrap_err().to_string();
        assert!(
            error.contains("101.0 MiB of memory in all, 100.0 MiB are"),
            "{error}"
        );
        assert_eq!(divided(true, 101).unwrap().max_unnamed, 5);
    }

    #[test]
    fn parts_that_the_machine_has_not_left_are_reported() {
        let parts = divided(false, 40).unwrap();
        let Some(Shortage::OfAll(text)) = shortage(&parts, 99 << 20) else {
            panic!("{:?}", shortage(&parts, 99 << 20));
        };
        let expected = "the parts of the named guests and of 3 unnamed ones are 100.0 MiB in all, \
                        and the machine has 99.0 MiB left now";
        assert!(text.starts_with(expected), "{text}");
        let Some(Shortage::OfNamed(text)) = shortage(&parts, 39 << 20) else {
            panic!("{:?}", shortage(&parts, 39 << 20));
        };
        let expected = "the parts of the named guests are 40.0 MiB in all, and the machine has 39";
        assert!(text.starts_with(expected), "{text}");
    }
}
