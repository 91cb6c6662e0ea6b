//! Settings that have no effect.

use tracing::warn;
use vgpu_executor::config::Settings;
use vgpu_executor::engine::EngineKind;

use super::args::Args;

/// Says in the log which settings have no effect with these engines.
pub(super) fn log(args: &Args, settings: &Settings, engines: &[EngineKind]) {
    // The supervisor gives all settings to the process of a machine.
    if !args.isolated_machine {
        let unused = unused(settings, args.isolate, engines);
        unused.iter().for_each(|text| warn!("{text}"));
    }
}

fn unused(settings: &Settings, is_isolated: bool, engines: &[EngineKind]) -> Vec<&'static str> {
    let are_cpu = engines.iter().all(|engine| *engine == EngineKind::Cpu);
    let found = [
        (
            settings.unnamed_programs.is_some() && !is_isolated,
            "unnamed.programs has no effect without --isolate: all programs of an origin are one \
             guest",
        ),
        (
            settings.host_memory.is_some() && are_cpu,
            "engine.host-memory has no effect on the CPU engine: graphs count against the memory \
             of their guest",
        ),
    ];
    let unused = found.into_iter().filter(|&(is_unused, _)| is_unused);
    unused.map(|(_, text)| text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_without_effect_are_found() {
        let (cpu, gpu) = (EngineKind::Cpu, EngineKind::Cuda(0));
        let mut settings = Settings::default();
        assert!(unused(&settings, false, std::slice::from_ref(&cpu)).is_empty());
        settings.unnamed_programs = Some(1);
        settings.host_memory = Some(1 << 30);
        assert!(unused(&settings, true, &[gpu.clone(), cpu.clone()]).is_empty());
        let text = unused(&settings, false, &[gpu]);
        assert!(text.len() == 1 && text[0].starts_with("unnamed.programs "));
        let text = unused(&settings, true, &[cpu]);
        assert!(text.len() == 1 && text[0].starts_with("engine.host-memory "));
    }
}
